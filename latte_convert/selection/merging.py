"""How many tokens each block works on: schedules, and the blocks of a model that can follow one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import merges_of
from latte_convert.attention import AttentionSite, SiteCall
from latte_convert.data.feed import Feed
from latte_convert.errors import CheckpointError, first_line


@dataclass(frozen=True)
class Mergeable:
    """The blocks of a model whose tokens can be merged.

    Attributes:
        blocks: By name, in order of execution; empty where there are none.
        reason: Why there are none.
    """

    blocks: tuple[str, ...] = ()
    reason: str = ""


def schedule(blocks: Sequence[str], left: float, bend: float = 1.0) -> dict[str, float]:
    """Share of the tokens that each block works on: 1 for the first, ``left`` for the last."""
    last = max(len(blocks) - 1, 1)
    return {block: round(1 - (1 - left) * (index / last) ** bend, 4) for index, block in enumerate(blocks)}


def mergeable(host: Host, sites: Sequence[AttentionSite], feed: Feed) -> Mergeable:
    """The blocks whose tokens can be merged: the longest run of blocks, one after another, that hold one site each.

    Each is plain self-attention that is eligible. Whether the model bears it is tried on the first input: blocks that
    get a mask, or positions of all tokens from outside, do not.
    """
    blocks = max(_runs(host, sites), key=len, default=[])
    if len(blocks) < 2:
        return Mergeable(reason="it has no two blocks in a row of plain, eligible self-attention")
    for inputs in feed:
        reason = _tried(host, blocks, sites, inputs)
        return Mergeable(reason=reason) if reason else Mergeable(tuple(blocks))
    return Mergeable(reason="there is no sample to try it on")


def _runs(host: Host, sites: Sequence[AttentionSite]) -> list[list[str]]:
    """Blocks of one list that follow each other, each with one site that can be merged around."""
    inside: dict[str, list[AttentionSite]] = {}
    for site in sites:
        inside.setdefault(host.block(site.name), []).append(site)
    runs: list[list[str]] = []
    before: tuple[str, int] | None = None
    for block, found in inside.items():
        around, _, number = block.rpartition(".")
        plain = len(found) == 1 and found[0].eligible and found[0].kind == "self" and not found[0].causal
        if not plain or not number.isdigit() or found[0].name == block:
            before = None
            continue
        if before != (around, int(number) - 1):
            runs.append([])
        runs[-1].append(block)
        before = around, int(number)
    return runs


def _tried(host: Host, blocks: Sequence[str], sites: Sequence[AttentionSite], inputs: object) -> str | None:
    """Why the model does not bear merging in these blocks, as one input shows; or None."""
    seen: dict[str, list[SiteCall]] = {}

    def note(name: str) -> Callable[[SiteCall], None]:
        return lambda call: seen.setdefault(name, []).append(call)

    names = [site.name for site in sites if host.block(site.name) in blocks]
    with host.watch({name: note(name) for name in names}):
        host.run(inputs)  # type: ignore[arg-type]
    for name in names:
        calls = seen.get(name, [])
        if len(calls) != 1:
            return f"{name} runs {len(calls)} times in a pass"
        call = calls[0]
        if call.mask is not None or call.bias is not None or call.causal or not call.layout.aligned:
            return f"{name} has a mask or a bias, or attends to other tokens than its own"
        if call.obstacle is not None:
            return f"{name}: {call.obstacle}"
    first = seen[names[0]][0]
    towers = {site.tower for site in sites if site.name in names}
    if towers == {"vision"} and first.layout.grid is None:
        return "it is not known which of its tokens are patches of the image"
    behind = first.key.shape[2] - first.layout.prefix
    if behind < 4 * len(blocks):
        return f"its blocks work on {behind} tokens, too few to merge"
    try:
        with host.convert(merges_of(schedule(blocks, 0.5))) as applied:
            host.run(inputs)  # type: ignore[arg-type]
            last = applied.shapes[names[-1]].keys
    except (RuntimeError, ValueError, TypeError, IndexError, CheckpointError) as error:
        return f"it does not run on fewer tokens ({first_line(error)})"
    if last > first.layout.prefix + 0.5 * behind + 1:
        return "something between its blocks puts the tokens into new memory"
    return None
