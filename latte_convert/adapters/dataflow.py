"""Attention as it is seen in the calls that a module makes to PyTorch, whatever its code looks like.

Attention is one call of ``scaled_dot_product_attention``, or ``softmax(q kᵀ) v`` written out: two products and a
softmax between them. The second is told by data flow. While a module is watched, a product of two activations is not
computed but becomes ``Logits``: a tensor of the right shape that remembers what it is made of. What usually comes
before the softmax (a scale, a mask, a cast, another view) and behind it (dropout) adds to that; a product with the
values makes it attention, which ``attend`` answers, without N² numbers. Anything else that is done with it computes it,
as the module would have: nothing needs to be known of the module, and what is not attention comes out as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from latte_convert import compat

if TYPE_CHECKING:
    from collections.abc import Iterator

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """One computation of attention; ``*`` are the dimensions of batch and heads, as the module has them.

    Attributes:
        query: ``(*, Nq, d)``.
        key: ``(*, Nk, d)``; of grouped queries it has fewer heads.
        value: ``(*, Nk, dv)``.
        exact: Computes what the module itself would, ``(*, Nq, dv)``.
        scale: Factor on the logits; None is ``d**-0.5``.
        masks: Each boolean (True attends) or additive, and broadcast to the logits.
        causal: Whether a flag makes it causal.
        dropout: Dropout of attention weights that would be applied now.
        obstacle: What else is done to the logits or the weights, or None.
        origin: What was running when the logits were computed, see ``Watched``.
        parts: Where the module has put as many tokens together as there are keys: how many were of each kind.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    exact: Callable[[], Tensor]
    scale: float | None = None
    masks: tuple[Tensor, ...] = ()
    causal: bool = False
    dropout: float = 0.0
    obstacle: str | None = None
    origin: Any = None
    parts: Shape = ()


Attend = Callable[[Found], Tensor]
"""Answers attention with ``(*, Nq, dv)``."""

_depth: ContextVar[int] = ContextVar("latte_depth", default=0)


@contextmanager
def deeper() -> Iterator[None]:
    """What is called here is none of those that are watched around it."""
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def keep_apart(module: nn.Module) -> Callable[[], None]:
    """Have what a module computes be none of those that are watched around it; returns a function that ends that."""

    def enter(*_: Any) -> None:
        _depth.set(_depth.get() + 1)

    def leave(*_: Any) -> None:
        _depth.set(_depth.get() - 1)

    hooks = module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


class Watched(TorchFunctionMode):
    """A context in which attention is answered by a function.

    Args:
        attend: The function.
        origin: Noted where logits are computed, for the attention that they become: what is running.
        at_once: Whether logits are computed when the module computes them: for a module that is not known yet, which
            may change what they are made of in place.
    """

    def __init__(self, attend: Attend, origin: Callable[[], Any] = lambda: None, *, at_once: bool = False) -> None:
        super().__init__()
        self.attend, self.origin, self.at_once = attend, origin, at_once
        self._depth = _depth.get()
        self._parts: dict[int, Shape] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one call; whatever it calls itself is not looked at."""
        kwargs = kwargs or {}
        if _depth.get() != self._depth:
            return func(*args, **kwargs)
        if func in _FUSED:
            return self.answer(_fused(func, *_plain(args), origin=self.origin(), **_plain(kwargs)))
        if func in _PRODUCTS and not any(isinstance(each, Logits) for each in args):
            product = _product(func, args, kwargs)
            if product is not None:
                return Logits.of(replace(product, origin=self.origin()), self, lambda: func(*args, **kwargs))
        if func in _JOINING:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def answer(self, found: Found) -> Tensor:
        """Attention, of tokens that may have been put together."""
        return self.attend(replace(found, parts=self._parts.get(found.key.shape[-2], ())))

    def _note(self, tensors: Any, dim: int = 0, **_: Any) -> None:
        if all(isinstance(each, Tensor) and each.dim() > 2 and each.dim() > dim for each in tensors):
            sizes = tuple(each.shape[dim] for each in tensors)
            self._parts[sum(sizes)] = sizes


def _fused(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    origin: Any = None,
) -> Found:
    """A call of ``scaled_dot_product_attention``."""

    def exact() -> Tensor:
        output: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return output

    masks = () if attn_mask is None else (attn_mask,)
    return Found(query, key, value, exact, scale, masks, is_causal, dropout_p, origin=origin)


@dataclass(frozen=True)
class _Made:
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


class _Later:
    """A tensor that is computed when it is needed; only what a module itself asks for is kept."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute
        self.kept: Tensor | None = None

    def get(self) -> Tensor:
        return self.compute() if self.kept is None else self.kept

    def keep(self) -> Tensor:
        self.kept = self.get()
        return self.kept


class Logits(Tensor):
    """Logits of attention, or its weights, which are computed where something else than attention becomes of them."""

    made: _Made
    later: _Later
    watched: Watched

    @classmethod
    def of(cls, made: _Made, watched: Watched, compute: Callable[[], Tensor], dtype: torch.dtype | None = None) -> Any:
        """Logits that ``compute`` would give; one number stands for all of them, and it is none."""
        self = made.query.new_full((), float("nan"), dtype=dtype).expand(made.shape).as_subclass(cls)
        self.made, self.later, self.watched = made, _Later(compute), watched
        if watched.at_once:
            self.later.keep()
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation on logits."""
        kwargs = kwargs or {}
        self = next((each for each in args if isinstance(each, Logits)), None)
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if self is None or not (func in _RULES or func in _CHANGES or func in _PRODUCTS):
            return func(*_plain(args), **_plain(kwargs))
        output = _answered(self, func, args, kwargs) if func in _PRODUCTS and self.made.weights else None
        return self._next(func, args, kwargs) if output is None else output

    def _next(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation makes of logits: others, or these where it is done in place."""
        name = func.__name__
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        made = _RULES[func](self, args, kwargs) if func in _RULES else None
        before, inputs = (
            self.later,
            compat.tree_map(lambda leaf: leaf.later if isinstance(leaf, Logits) else leaf, args),
        )

        def compute() -> Tensor:
            if not in_place:
                found: Tensor = func(*_plain(inputs), **_plain(kwargs))
                return found
            own = before.get()
            own = own if before.kept is None else own.clone()
            func(own, *_plain(inputs[1:]), **_plain(kwargs))
            return own

        if made is None:  # computed now, and followed only to say what stands in the way
            value = compute()
            if value.shape != self.made.shape:
                return value
            where = "weights" if self.made.weights else "logits"
            made = replace(self.made, obstacle=self.made.obstacle or f"'{name.strip('_')}' on its attention {where}")
            found = Logits.of(made, self.watched, lambda: value, value.dtype)
        else:
            found = Logits.of(made, self.watched, compute, _dtype(self, func, args, kwargs))
        if not in_place:
            return found
        self.made, self.later = found.made, found.later
        return self


def _plain(tree: Any) -> Any:
    """Arguments with numbers in the place of logits."""

    def computed(leaf: Any) -> Any:
        if isinstance(leaf, _Later):
            return leaf.get()
        return leaf.later.keep() if isinstance(leaf, Logits) else leaf

    return compat.tree_map(computed, tree)


def _dtype(self: Logits, func: Any, args: Any, kwargs: Any) -> torch.dtype:
    """The dtype of what an operation makes of logits."""
    few = [torch.empty((1,) * self.dim(), dtype=self.dtype) if each is self else each for each in args]
    if func in _ARITHMETIC:
        return torch.result_type(*few[:2])
    if func in _CASTS:
        found: Tensor = func(*few, **kwargs)
        return found.dtype
    return kwargs.get("dtype") or self.dtype


# -- The two products ------------------------------------------------------------------------------------------------


def _product(func: Any, args: Any, kwargs: Any) -> _Made | None:
    """Two activations that are multiplied as queries and keys are; None where they are not."""
    try:
        made = _PRODUCTS[func][0](*args, **kwargs)
    except (TypeError, ValueError, RuntimeError):  # other arguments than those of two activations
        return None
    return None if made is None else replace(made, versions=made.seen)


def _activations(*tensors: Any) -> bool:
    return all(
        isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.dim() > 2 and x.is_floating_point()
        for x in tensors
    )


def _of_matmul(a: Tensor, b: Tensor) -> _Made | None:
    if not _activations(a, b) or a.shape[-1] != b.shape[-2]:
        return None
    return _spread(a, b.mT)


def _of_baddbmm(start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> _Made | None:
    made = _of_matmul(a, b)
    return made and replace(
        made,
        scale=float(alpha),
        masks=(start,) if beta == 1 else (),
        obstacle=(None if beta in (0, 1) else "a factor on what is added to its logits"),
    )


def _of_einsum(equation: str, *operands: Any) -> _Made | None:
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


def _spread(query: Tensor, key: Tensor) -> _Made:
    """Queries and keys with the same dimensions in front: heads that share their keys have them each."""
    lead = _broadcast(query.shape[:-2], key.shape[:-2])
    return _Made(query.expand(*lead, *query.shape[-2:]), key.expand(*lead, *key.shape[-2:]))


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


def _values_of_matmul(weights: Logits, one: Any, two: Any) -> Values | None:
    return (two, list(range(two.dim()))) if one is weights and _activations(two) else None


def _values_of_einsum(weights: Logits, equation: str, *operands: Any) -> Values | None:
    terms, output = _terms(equation, *operands)
    place = 0 if operands[0] is weights else 1
    mine, value = terms[place], terms[1 - place]
    lead, query, key = mine[:-2], mine[-2], mine[-1]
    width = "".join(set(value) - set(mine))
    given = lead + query + width
    if len(width) != 1 or query in value or key not in value or sorted(output) != sorted(given):
        return None
    return _arranged(operands[1 - place], value, lead + key + width), [given.index(letter) for letter in output]


def _answered(weights: Logits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The product of attention weights and values; None where it is another product."""
    made = weights.made
    try:
        found = _PRODUCTS[func][1](weights, *args)
    except (TypeError, ValueError):  # other arguments than those of weights and values
        found = None
    if found is None or found[0].dim() != weights.dim() or found[0].shape[-2] != weights.shape[-1]:
        return None
    value, order = found

    def exact() -> Tensor:
        computed: Tensor = func(*(each.later.get() if each is weights else each for each in args), **kwargs)
        return computed.permute([order.index(place) for place in range(len(order))])

    unchanged = made.seen == made.versions
    answer = weights.watched.answer(
        Found(
            made.query, made.key, value.expand(*made.lead, *value.shape[-2:]), exact, made.scale, made.masks,
            dropout=made.dropout, origin=made.origin,
            obstacle=made.obstacle if unchanged else "its queries or keys are changed in place before its softmax",
        )
    )  # fmt: skip
    return answer.permute(order)


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


def _multiplied(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    return None if kwargs else _factor(self, _other(self, args))


def _divided(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    return None if kwargs or args[0] is not self else _factor(self, 1 / args[1])


def _factor(self: Logits, factor: Any) -> _Made | None:
    made = self.made
    if made.weights:
        return None
    if isinstance(factor, int | float):
        return replace(made, scale=made.scale * factor)
    if not _fits(self, factor) or not _same_for_keys(factor):
        return None
    made = replace(made, query=made.query * factor)  # a temperature, of each head or query perhaps
    return replace(made, versions=made.seen)


def _added(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    other = _other(self, args)
    if self.made.weights or kwargs or not (isinstance(other, int | float) or _fits(self, other)):
        return None
    if isinstance(other, int | float) or _same_for_keys(other):
        return self.made  # softmax does not see it
    return replace(self.made, masks=(*self.made.masks, other))


def _subtracted(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    made = _added(self, args, kwargs)
    return made if made is self.made and args[0] is self else None


def _filled(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    arguments = dict(zip(("self", "mask", "value"), args, strict=False)) | kwargs
    return _hidden(self, ~arguments["mask"], arguments["value"])


def _chosen(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    if len(args) != 3:
        return None
    condition, one, two = args
    if one is self:
        return _hidden(self, condition, two)
    return _hidden(self, ~condition, one) if two is self else None


def _kept(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    return _hidden(self, *args[1:]) if len(args) == 3 and args[0] is self else None


def _hidden(self: Logits, attends: Any, value: Any) -> _Made | None:
    """Logits of keys that do not take part are replaced by a very small number."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return None
    if self.made.weights or not _fits(self, attends) or float(value) > _LARGE:
        return None
    return replace(self.made, masks=(*self.made.masks, attends))


def _softmax(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return None if self.made.weights or dim not in (-1, self.dim() - 1) else replace(self.made, weights=True)


def _dropped(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    arguments = {"p": 0.5, "training": True} | dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    p = float(arguments["p"]) if arguments.get("train", arguments["training"]) else 0.0
    if not p:
        return self.made
    return replace(self.made, dropout=p) if self.made.weights else None


def _cast(self: Logits, args: Any, kwargs: Any) -> _Made | None:
    told = (*args[1:], *kwargs.values())
    here = (isinstance(each, torch.dtype) or (isinstance(each, Tensor) and each.device == self.device) for each in told)
    return self.made if all(here) else None


def _viewed(self: Logits, args: Any, kwargs: Any, *, func: Any) -> _Made | None:
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


_FUSED = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_JOINING = {torch.cat, torch.concat, torch.concatenate}
_MATMUL = (_of_matmul, _values_of_matmul)
_PRODUCTS: dict[Any, Any] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _MATMUL),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), (_of_baddbmm, lambda *_: None)),
    torch.einsum: (_of_einsum, _values_of_einsum),
}
"""By function: what makes queries and keys of its arguments, and what values."""
_ARITHMETIC: dict[Any, Any] = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__), _multiplied),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__), _divided),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__), _added),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__), _subtracted),
}
_CASTS: dict[Any, Any] = dict.fromkeys(
    (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double), _cast
)
_VIEWS = (
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, Tensor.flatten, torch.flatten, Tensor.unsqueeze,
    torch.unsqueeze, Tensor.squeeze, torch.squeeze,
)  # fmt: skip
_RULES: dict[Any, Any] = {
    **_ARITHMETIC,
    **_CASTS,
    **{view: partial(_viewed, func=view) for view in _VIEWS},
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), _filled),
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _softmax),
    **dict.fromkeys((torch.dropout, F.dropout), _dropped),
    torch.where: _chosen,
    Tensor.where: _kept,
    Tensor.contiguous: _cast,
}
"""By function: what it makes of logits; None where that is no attention as it is known here."""
_CHANGES = {
    torch.tanh, Tensor.tanh, torch.clamp, Tensor.clamp, Tensor.clamp_, torch.sigmoid, Tensor.sigmoid, torch.pow,
    Tensor.pow, Tensor.__pow__, torch.nan_to_num, Tensor.nan_to_num, torch.relu, F.relu, Tensor.__setitem__,
    Tensor.copy_,
}  # fmt: skip
"""Functions behind which logits are followed, to say what stands in the way."""
_FACTS = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__, Tensor.is_cuda.__get__, Tensor.size, Tensor.dim, Tensor.numel,  # type: ignore[attr-defined]
    Tensor.is_floating_point, Tensor.__len__,
}  # fmt: skip
"""What is asked of logits without their numbers."""
