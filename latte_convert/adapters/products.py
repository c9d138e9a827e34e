"""What is known of attention that is written out: its two products, and what may be done between them.

Each function here reads one call to PyTorch. It says what ``Logits`` are made of behind that call, or None where that
is no attention as it is known here; it computes nothing that has a number for each query and key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert import compat

if TYPE_CHECKING:
    from latte_convert.adapters.dataflow import Logits

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """What logits, or attention weights, are made of; see ``Found``.

    Attributes:
        weights: Whether the softmax has been taken.
        versions: How often query and key had been changed in place when they were multiplied.
    """

    query: Tensor
    key: Tensor
    scale: float = 1.0
    masks: tuple[Tensor, ...] = ()
    dropout: float = 0.0
    obstacle: str | None = None
    origin: Any = None
    weights: bool = False
    versions: tuple[int | None, ...] = ()

    @property
    def lead(self) -> Shape:
        """Sizes of the dimensions of batch and heads."""
        return tuple(self.query.shape[:-2])

    @property
    def shape(self) -> Shape:
        """Of the logits."""
        return (*self.lead, self.query.shape[-2], self.key.shape[-2])

    @property
    def seen(self) -> tuple[int | None, ...]:
        """``versions`` as they are now."""
        return compat.version(self.query), compat.version(self.key)


# -- The two products ------------------------------------------------------------------------------------------------


def product(func: Any, args: Any, kwargs: Any) -> Made | None:
    """Two activations that are multiplied as queries and keys are; None where they are not."""
    try:
        made = PRODUCTS[func][0](*args, **kwargs)
    except (TypeError, ValueError, RuntimeError):  # other arguments than those of two activations
        return None
    return None if made is None else replace(made, versions=made.seen)


def _activations(*tensors: Any) -> bool:
    return all(
        isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.dim() > 2 and x.is_floating_point()
        for x in tensors
    )


def _of_matmul(a: Tensor, b: Tensor) -> Made | None:
    if not _activations(a, b) or a.shape[-1] != b.shape[-2]:
        return None
    return _spread(a, b.mT)


def _of_baddbmm(start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Made | None:
    made = _of_matmul(a, b)
    return made and replace(
        made,
        scale=float(alpha),
        masks=(start,) if beta == 1 else (),
        obstacle=(None if beta in (0, 1) else "a factor on what is added to its logits"),
    )


def _of_einsum(equation: str, *operands: Any) -> Made | None:
    (one, two), output = _terms(equation, *operands)
    lead, query, key = output[:-2], output[-2], output[-1]
    if query in two:
        one, two, operands = two, one, operands[::-1]
    shared = set(one) & set(two) - set(output)
    if len(shared) != 1 or not _activations(*operands) or not _alike(one, {*lead, query} | shared):
        return None
    if query in two or not _alike(two, {*lead, key} | shared):
        return None
    width = shared.pop()
    return _spread(_arranged(operands[0], one, lead + query + width), _arranged(operands[1], two, lead + key + width))


def _spread(query: Tensor, key: Tensor) -> Made:
    """Queries and keys with the same dimensions in front: heads that share their keys have them each."""
    lead = _broadcast(query.shape[:-2], key.shape[:-2])
    return Made(query.expand(*lead, *query.shape[-2:]), key.expand(*lead, *key.shape[-2:]))


def _broadcast(*shapes: Any) -> Shape:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _terms(equation: str, *operands: Any) -> tuple[list[str], str]:
    """Letters of the operands and of the output of an equation, a letter for each dimension.

    Raises:
        ValueError: It is another kind of equation.
    """
    given, _, output = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    hidden = {x.dim() - len(term) + 3 for term, x in zip(terms, operands, strict=True) if "..." in term}
    if not output or len(terms) != 2 or len(hidden) > 1:
        raise ValueError(equation)
    dots = "".join(letter for letter in ascii_letters if letter not in equation)[: next(iter(hidden), 0)]
    return [term.replace("...", dots) for term in terms], output.replace("...", dots)


def _alike(term: str, letters: set[str]) -> bool:
    """Whether a term has no letter twice, and none but these."""
    return len(set(term)) == len(term) and set(term) <= letters


def _arranged(tensor: Tensor, term: str, wanted: str) -> Tensor:
    """A tensor with its dimensions in another order, and of size 1 where it has none."""
    there = [letter for letter in wanted if letter in term]
    tensor = tensor.permute([term.index(letter) for letter in there])
    for place, letter in enumerate(wanted):
        if letter not in term:
            tensor = tensor.unsqueeze(place)
    return tensor


Values = tuple[Tensor, list[int]]
"""Values as ``(*, Nk, dv)``, and the order in which the module has the dimensions of ``(*, Nq, dv)``."""


def _values_of_matmul(weights: Tensor, one: Any, two: Any) -> Values | None:
    return (two, list(range(two.dim()))) if one is weights and _activations(two) else None


def _values_of_einsum(weights: Tensor, equation: str, *operands: Any) -> Values | None:
    terms, output = _terms(equation, *operands)
    place = 0 if operands[0] is weights else 1
    mine, value = terms[place], terms[1 - place]
    lead, query, key = mine[:-2], mine[-2], mine[-1]
    width = "".join(set(value) - set(mine))
    given = lead + query + width
    if len(width) != 1 or query in value or key not in value or sorted(output) != sorted(given):
        return None
    return _arranged(operands[1 - place], value, lead + key + width), [given.index(letter) for letter in output]


# -- What may be done between them -----------------------------------------------------------------------------------


_LARGE = -1e4
"""What is added to a logit, or put in its place, to hide a key: this or less."""


def _fits(self: Logits, other: Any) -> bool:
    """Whether a tensor is broadcast to the logits."""
    return isinstance(other, Tensor) and _broadcast(self.shape, other.shape) == self.shape


def _same_for_keys(other: Tensor) -> bool:
    return other.dim() == 0 or other.shape[-1] == 1


def _other(self: Logits, args: Any) -> Any:
    return args[1] if args[0] is self else args[0]


def _multiplied(self: Logits, args: Any, kwargs: Any) -> Made | None:
    return None if kwargs else _factor(self, _other(self, args))


def _divided(self: Logits, args: Any, kwargs: Any) -> Made | None:
    return None if kwargs or args[0] is not self else _factor(self, 1 / args[1])


def _factor(self: Logits, factor: Any) -> Made | None:
    made = self.made
    if made.weights:
        return None
    if isinstance(factor, int | float):
        return replace(made, scale=made.scale * factor)
    if not _fits(self, factor) or not _same_for_keys(factor):
        return None
    made = replace(made, query=made.query * factor)  # a temperature, of each head or query perhaps
    return replace(made, versions=made.seen)


def _added(self: Logits, args: Any, kwargs: Any) -> Made | None:
    other = _other(self, args)
    if self.made.weights or kwargs or not (isinstance(other, int | float) or _fits(self, other)):
        return None
    if isinstance(other, int | float) or _same_for_keys(other):
        return self.made  # softmax does not see it
    return replace(self.made, masks=(*self.made.masks, other))


def _subtracted(self: Logits, args: Any, kwargs: Any) -> Made | None:
    made = _added(self, args, kwargs)
    return made if made is self.made and args[0] is self else None


def _filled(self: Logits, args: Any, kwargs: Any) -> Made | None:
    arguments = dict(zip(("self", "mask", "value"), args, strict=False)) | kwargs
    return _hidden(self, ~arguments["mask"], arguments["value"])


def _chosen(self: Logits, args: Any, kwargs: Any) -> Made | None:
    if len(args) != 3:
        return None
    if args[0] is self:  # logits.where(attends, value)
        return _hidden(self, *args[1:])
    condition, one, two = args
    return _hidden(self, condition, two) if one is self else _hidden(self, ~condition, one)


def _hidden(self: Logits, attends: Any, value: Any) -> Made | None:
    """Logits of keys that do not take part are replaced by a very small number."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return None
    if self.made.weights or not _fits(self, attends) or float(value) > _LARGE:
        return None
    return replace(self.made, masks=(*self.made.masks, attends))


def _softmax(self: Logits, args: Any, kwargs: Any) -> Made | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return None if self.made.weights or dim not in (-1, self.dim() - 1) else replace(self.made, weights=True)


def _dropped(self: Logits, args: Any, kwargs: Any) -> Made | None:
    arguments = {"p": 0.5, "training": True} | dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    p = float(arguments["p"]) if arguments.get("train", arguments["training"]) else 0.0
    if not p:
        return self.made
    return replace(self.made, dropout=p) if self.made.weights else None


def _cast(self: Logits, args: Any, kwargs: Any) -> Made | None:
    told = (*args[1:], *kwargs.values())
    here = (isinstance(each, torch.dtype) or (isinstance(each, Tensor) and each.device == self.device) for each in told)
    return self.made if all(here) else None


def _viewed(self: Logits, args: Any, kwargs: Any, *, func: Any) -> Made | None:
    """The same logits with other dimensions of batch and heads."""
    made, shape = self.made, func(torch.empty(self.shape, device="meta"), *args[1:], **kwargs).shape
    if shape[-2:] != self.shape[-2:]:
        return None
    query, key = (x.reshape(*shape[:-2], *x.shape[-2:]) for x in (made.query, made.key))
    masks = tuple(mask if mask.dim() < 3 else _under(mask, made.lead, tuple(shape[:-2])) for mask in made.masks)
    made = replace(made, query=query, key=key, masks=masks)
    return replace(made, versions=made.seen)


def _under(mask: Tensor, lead: Shape, new: Shape) -> Tensor:
    """A mask under other dimensions of batch and heads."""
    rows = mask.shape[-2:]
    return mask.reshape(rows) if mask.numel() == rows.numel() else mask.expand(*lead, *rows).reshape(*new, *rows)


def named(*names: str) -> list[Any]:
    """The functions of these names: of PyTorch, of its functional module, and methods of tensors."""
    found = (getattr(home, name, None) for name in names for home in (torch, F, Tensor))
    return [function for function in found if callable(function)]


PRODUCTS: dict[Any, Any] = {
    **dict.fromkeys(named("matmul", "__matmul__", "bmm"), (_of_matmul, _values_of_matmul)),
    **dict.fromkeys(named("baddbmm"), (_of_baddbmm, lambda *_: None)),
    torch.einsum: (_of_einsum, _values_of_einsum),
}
"""By function: what makes queries and keys of its arguments, and what values."""
_ARITHMETIC: dict[Any, Any] = {
    **dict.fromkeys(named("mul", "mul_", "__mul__", "__rmul__"), _multiplied),
    **dict.fromkeys(named("div", "div_", "__truediv__"), _divided),
    **dict.fromkeys(named("add", "add_", "__add__", "__radd__"), _added),
    **dict.fromkeys(named("sub", "sub_", "__sub__"), _subtracted),
}
_CASTS = dict.fromkeys(named("to", "type", "type_as", "float", "half", "bfloat16", "double"), _cast)
_VIEWS = named("view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze")
RULES: dict[Any, Any] = {
    **_ARITHMETIC,
    **_CASTS,
    **{view: partial(_viewed, func=view) for view in _VIEWS},
    **dict.fromkeys(named("masked_fill", "masked_fill_"), _filled),
    **dict.fromkeys(named("where"), _chosen),
    **dict.fromkeys(named("softmax"), _softmax),
    **dict.fromkeys(named("dropout"), _dropped),
    **dict.fromkeys(named("contiguous"), _cast),
}
"""By function: what it makes of logits; None where that is no attention as it is known here."""


def dtype_of(self: Logits, func: Any, args: Any, kwargs: Any) -> torch.dtype:
    """The dtype of what an operation makes of logits."""
    few = [torch.empty((1,) * self.dim(), dtype=self.dtype) if each is self else each for each in args]
    if func in _ARITHMETIC:
        return torch.result_type(*few[:2])
    if func in _CASTS:
        found: Tensor = func(*few, **kwargs)
        return found.dtype
    return kwargs.get("dtype") or self.dtype
