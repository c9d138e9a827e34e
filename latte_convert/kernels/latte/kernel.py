"""LATTE: linear attention from the diagonal of a tunable second-order Taylor expansion of softmax."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.graphs import recorded
from latte_convert.kernels.base import Extras, Kernel
from latte_convert.kernels.device import runs_in_triton
from latte_convert.kernels.fitting import Stage
from latte_convert.kernels.latte.fit import LatteStage
from latte_convert.kernels.linear import causal_sums, divided, linear_flops, no_autocast


class LatteKernel(Kernel):
    """``sigma ⊙ latte_attention(query, key, value)`` with the five scalars of a site and its output scale.

    ``alpha, delta_q, delta_k, beta_q, beta_k`` start as the plain expansion around 0 (``alpha = 0``, the rest
    1); calibration fits them and fine-tuning may go on from there. All are float32.

    Args:
        heads: Number of heads.
        head_dim: Channels per head of query, key and value.
        granularity: ``layer``: scalars of shape ``(1,)``; ``head``: of shape ``(heads,)``.
        tte: Whether ``alpha`` is read; without it the anchor is 0.
        jpn: Whether the squares are normalised.
        **extras: See ``Extras``.
    """

    name = "latte"
    causal_form = True
    folds_sigma = True
    legend = "alpha is the anchor of the Taylor expansion, ratio is (δq δk) / (βq βk)"
    recommended: ClassVar[Extras] = {"exact_prefix": True, "sigma": True}

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        granularity: Literal["layer", "head"] = "layer",
        tte: bool = True,
        jpn: bool = True,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(heads, head_dim, **extras)
        if granularity not in ("layer", "head"):
            raise ValueError(f"granularity is 'layer' or 'head', not {granularity!r}")
        self.options |= {"granularity": granularity, "tte": tte, "jpn": jpn}
        self.tte = tte
        self.jpn = jpn
        groups = heads if granularity == "head" else 1
        self.alpha = nn.Parameter(torch.zeros(groups, dtype=torch.float32))
        self.delta_q = nn.Parameter(torch.ones(groups, dtype=torch.float32))
        self.delta_k = nn.Parameter(torch.ones(groups, dtype=torch.float32))
        self.beta_q = nn.Parameter(torch.ones(groups, dtype=torch.float32))
        self.beta_k = nn.Parameter(torch.ones(groups, dtype=torch.float32))

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend; see ``Kernel.forward``."""
        return latte_attention(
            call,
            alpha=self.alpha,
            delta_q=self.delta_q,
            delta_k=self.delta_k,
            beta_q=self.beta_q,
            beta_k=self.beta_k,
            sigma=self.sigma,
            tte=self.tte,
            jpn=self.jpn,
        )

    def own_stages(self, weight: Tensor | None, seed: int) -> list[Stage]:
        """A search for the scalars."""
        return [LatteStage(self, weight, seed)]

    def descended(self) -> list[nn.Parameter]:
        """Behind fitted maps of queries and keys the scalars are fitted again, together with these."""
        if self.query_map is None:
            return []
        return [*super().descended(), *([self.alpha] if self.tte else []), self.delta_q]

    @torch.no_grad()
    def scalars(self) -> dict[str, Tensor]:
        """``alpha``, and the ratio of the other four, which is all that matters of them."""
        ratio = self.delta_q * self.delta_k / (self.beta_q * self.beta_k)
        return {"alpha": self.alpha.detach(), "ratio": ratio}

    def attend_flops(self, shape: CallShape) -> int:
        """``K~ᵀ[V, 1]`` and ``Q^`` times it; causal, what the chunked prefix sums compute."""
        return linear_flops(shape, shape.head_dim, padding=1)

    def paper_flops(self, shape: CallShape) -> int:
        """``N·H·(d+1)²``; where shapes differ, the mean of ``Nq`` and ``Nk``, and ``(d+1)·(dv+1)``.

        Like all of the paper's formulas it ignores causality.
        """
        return (shape.queries + shape.keys) * shape.heads * (shape.head_dim + 1) * (shape.value_dim + 1) // 2


def latte_attention(
    call: AttentionCall,
    *,
    alpha: Tensor,
    delta_q: Tensor,
    delta_k: Tensor,
    beta_q: Tensor,
    beta_k: Tensor,
    sigma: Tensor | None = None,
    tte: bool = True,
    jpn: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    r"""Linear attention: the similarity is the diagonal of a second-order expansion of ``exp``.

    With ``x = scale·<q, k>``, ``exp(x) ≈ e^alpha/2 · [(x + 1 - alpha)² + 1]``. The exact square needs
    ``(d+1)²`` features; LATTE keeps its diagonal, elementwise::

        psi(x) = (sqrt(scale)·x + sqrt(1 - alpha))²
        q~_i   = delta_q·psi(q_i) / h'_ij,    k~_j = delta_k·psi(k_j) / h'_ij
        h'_ij  = sqrt((|psi(q_i)| + eps)·(|psi(k_j)| + eps)),    1 where jpn is off
        Sim_ij = <q~_i, k~_j> + beta_q·beta_k
        out_i  = sum_j Sim_ij·v_j / sum_j Sim_ij

    ``h'`` depends on the pair, yet the product ``<q~_i, k~_j>`` holds it squared, and ``h'_ij²`` is one
    factor per query times one per key. So every token is normalised on its own, and the sums over keys,
    ``K~ᵀV`` and ``K~ᵀ1``, are the same for all queries: O(N·d·dv).

    After the division only ``(delta_q·delta_k)/(beta_q·beta_k)`` matters. Positive products keep every
    weight positive; at ``beta_q·beta_k = 0`` a query that resembles no key gets a finite, meaningless value.

    The padding scalars add ``beta_q·beta_k`` to every weight: a multiple of the mean value ``v̄``, a plain
    sum instead of a concatenated feature. As ``sum_j (v_j - v̄) = 0`` it even drops out of the centred
    numerator, ``out_i = v̄ + sum_j <q~_i, k~_j>·(v_j - v̄) / sum_j Sim_ij``: the bidirectional form.

    Args:
        call: The call, any floating dtype; its mask is applied after the feature map.
        alpha: Anchor of the expansion, at most 1; like the next four ``(1,)`` or ``(H,)``.
        delta_q: Scale of the query features.
        delta_k: Scale of the key features.
        beta_q: Padding feature of the query.
        beta_k: Padding feature of the key.
        sigma: ``(H·dv,)`` scale of the output channels, or None.
        tte: Tunable expansion; off, the anchor is 0 and ``alpha`` is not read.
        jpn: Joint post-squaring normalisation; off, plain squares.
        eps: Added to the norms.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key. Features, sums and
        the division are float32 (float64 for float64 inputs), under autocast too.
    """
    query, key, value, scale = call.query, call.key, call.value, call.scale
    wide = torch.promote_types(query.dtype, torch.float32)
    with no_autocast(query.device.type):
        anchor = alpha.to(wide) if tte else torch.zeros(1, dtype=wide, device=query.device)
        # The slope of the root is infinite at alpha = 1; a floor below float32's resolution keeps it finite.
        shift = (1 - anchor).clamp_min(1e-12).sqrt().reshape(-1, 1, 1)
        delta = (delta_q * delta_k).to(wide).reshape(-1, 1, 1)
        settings = Settings(
            shift=shift / scale**0.5,
            eps=eps / scale if jpn else None,
            delta=delta if jpn else delta * scale**2,
            beta=(beta_q * beta_k).to(wide).reshape(-1, 1, 1),
            sigma=None if sigma is None else sigma.to(wide).reshape(query.shape[1], 1, -1),
        )
        seen = key.new_ones(1, 1, key.shape[-2], 1, dtype=wide)
        if call.mask is not None:
            seen = call.mask[:, None, :, None].to(wide)
        if runs_in_triton(call, alpha, delta_q, delta_k, beta_q, beta_k, sigma):
            from latte_convert.kernels.latte import triton  # it imports Triton

            with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
                return triton.attend(query, key, value, call.mask, settings, causal=call.causal)
        # Matmul merges batch and heads, by a copy for the (B, N, H, d) view of a batch: once is enough.
        value = value.to(wide).flatten(0, 1).reshape(value.shape)
        out = (_causal if call.causal else _bidirectional)(query, key, value, seen, settings)
    return out.to(query.dtype)


class Settings(NamedTuple):
    """The scalars, with ``psi`` divided by ``scale`` throughout: that spares a pass over queries and keys."""

    shift: Tensor  # m / sqrt(scale), (1 or H, 1, 1)
    eps: float | None  # eps / scale; None without normalisation
    delta: Tensor  # delta_q·delta_k, (1 or H, 1, 1); without normalisation times scale²
    beta: Tensor  # beta_q·beta_k, (1 or H, 1, 1)
    sigma: Tensor | None  # (H, 1, dv)


def _features(tokens: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """``psi`` of the tokens, ``(B, H, N, d)``, and what each is to be divided by, ``(B, H, N, 1)``."""
    # One copy that widens and also straightens the usual (B, N, H, d) view: matmul would copy that again.
    own = tokens.to(settings.shift.dtype, copy=True, memory_format=torch.contiguous_format)
    psi = own.add_(settings.shift).square_()
    if settings.eps is None:
        return psi, torch.ones_like(psi[..., :1])
    return psi, torch.linalg.vector_norm(psi, dim=-1, keepdim=True) + settings.eps


def _key_features(key: Tensor, seen: Tensor, settings: Settings) -> Tensor:
    """Normalised features, ``(B, H, Nk, d)``, zero for a key that is not seen."""
    psi, size = _features(key, settings)
    # In place unless autograd holds on to it: fresh memory costs more here than arithmetic.
    return psi * (seen / size) if recorded(psi) else psi.mul_(seen / size)


def _bidirectional(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, settings: Settings) -> Tensor:
    """Every query sees every key that is ``seen``, ``(B or 1, 1, Nk, 1)``."""
    total, count, mean, state = _key_sums(key, value, seen, settings)
    psi, size = _features(query, settings)
    # size_i·sum_j Sim_ij; leaving size on both sides of the fraction spares dividing every feature by it. A compiler
    # fuses the sum into the making of psi; eager, it would be a copy of psi, and a product is cheaper.
    share = (psi * total).sum(-1, keepdim=True) if torch.compiler.is_compiling() else psi @ total.mT
    divisor = share + settings.beta * count * size
    weight = divisor.masked_fill(divisor == 0, 1).reciprocal()
    psi = psi * weight if recorded(psi) else psi.mul_(weight)
    # One product that starts from the mean: the output is written once.
    shape = (*psi.shape[:-1], state.shape[-1])
    return torch.baddbmm(*(x.flatten(0, 1) for x in (mean, psi, state))).reshape(shape)


def _key_sums(key: Tensor, value: Tensor, seen: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that queries need to know of the keys; a function of its own so that the features are freed.

    Returns:
        ``delta·K~ᵀ1`` ``(B, H, 1, d)``, number of keys ``(B or 1, 1, 1, 1)``, mean value ``(B, H, 1, dv)``,
        and the centred ``delta·K~ᵀV`` ``(B, H, d, dv)``, the last two times ``sigma``.
    """
    features = _key_features(key, seen, settings)
    count = seen.sum(-2, keepdim=True)
    total = settings.delta * (seen.mT @ features)
    mean = seen.mT @ value / count.clamp_min(1)
    state = settings.delta * (features.mT @ value) - total.mT * mean
    if settings.sigma is not None:  # on the small tensors rather than on the output
        state, mean = state * settings.sigma, mean * settings.sigma
    return total, count, mean, state


def _causal(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, settings: Settings) -> Tensor:
    """Chunked prefix sums, with the padding feature beside the others."""
    features = _key_features(key, seen, settings)
    psi, size = _features(query, settings)
    sums = causal_sums(settings.delta * psi, features, value, padding=(settings.beta * size, seen))
    out = divided(sums)
    return out if settings.sigma is None else out * settings.sigma
