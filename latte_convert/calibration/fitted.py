"""What calibration found: the kernels that could be fitted to each site, and the sites where none could."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from latte_convert.attention import AttentionSite
from latte_convert.calibration.fit import Fit
from latte_convert.errors import CheckpointError
from latte_convert.kernels.base import Kernel


@dataclass(frozen=True)
class Fitted:
    """The outcome of the fits.

    Attributes:
        sites: Every site; one that no kernel could be fitted to is not eligible any more, with the reason.
        fits: The fits that have a kernel, of each eligible site, in the order of the candidates.
    """

    sites: tuple[AttentionSite, ...]
    fits: Mapping[str, tuple[Fit, ...]]

    @classmethod
    def of(cls, sites: Iterable[AttentionSite], fits: Mapping[str, Sequence[Fit]]) -> Fitted:
        """Sort out the sites where every fit failed.

        Raises:
            CheckpointError: No site is left.
        """
        failed = {name: each[0].reason for name, each in fits.items() if all(fit.kernel is None for fit in each)}
        kept = tuple(
            replace(site, eligible=False, reason=failed[site.name]) if site.name in failed else site for site in sites
        )
        if not any(site.eligible for site in kept):
            raise CheckpointError(
                "no attention site can be converted: " + "; ".join(sorted(set(map(str, failed.values()))))
            )
        used = {site.name: tuple(f for f in fits[site.name] if f.kernel is not None) for site in kept if site.eligible}
        return cls(kept, used)

    @property
    def eligible(self) -> list[AttentionSite]:
        """Sites that can be converted, in order of the module tree."""
        return [site for site in self.sites if site.eligible]

    @property
    def kernels(self) -> dict[str, list[Kernel]]:
        """The fitted kernels of each eligible site, in the order of the candidates."""
        return {name: [fit.kernel for fit in each if fit.kernel is not None] for name, each in self.fits.items()}
