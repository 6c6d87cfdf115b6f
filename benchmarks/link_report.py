"""Tables and plots of the link benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from link_cases import NBYTES, Case, least_exposed, least_exposed_sharded, wire_seconds
from paced import EVEN
from report import median, paired_ratio, plots, table

SHIPPED = "ddp as shipped"
PLAIN = " (plain loop)"
UNSYNCHRONISED = "unsynchronised"
BOUND = "bound for an all-reduce"
HALF_BOUND = "bound for an all-reduce in 16 bits"
SHARDED_BOUND = "bound for a sharded optimizer"


@dataclass
class Measured:
    """Rank 0's measurements in one case: one value per round, times in seconds.

    Attributes:
        steps: By peer, the median step.
        all_reduce: An all-reduce of all gradients in one piece.
        backward: Backward of the model, unsynchronised and without a Trainer.
        forward: Its forward, in the same manner.
        optimizer: A step of the optimizer, on all parameters.
        passes: By peer of this package, the median times of backward, and from its end until gradients were published.
        busy: By peer, the processor time of all ranks in a step.
        skipped: By peer, why it did not run.
        sizes: Parameters of each layer.
        ranks: How many ranks there are, on two hosts.
    """

    steps: dict[str, list[float]] = field(default_factory=dict)
    all_reduce: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    passes: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    busy: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    sizes: Sequence[int] = EVEN
    ranks: int = 2

    @property
    def exposed(self) -> float:
        """Seconds of an all-reduce that backward cannot hide. A bound, so the fastest all-reduce counts."""
        return least_exposed(min(self.all_reduce), median(self.backward), self.sizes)

    def bound(self, plain: bool) -> float:
        """The shortest possible step, in seconds, if an all-reduce during backward averages gradients."""
        return median(self.steps[UNSYNCHRONISED + PLAIN * plain]) + self.exposed

    def half_bound(self, plain: bool) -> float:
        """As :meth:`bound`, if each element has 16 bits on the wire."""
        exposed = least_exposed(min(self.all_reduce) / 2, median(self.backward), self.sizes)
        return median(self.steps[UNSYNCHRONISED + PLAIN * plain]) + exposed

    @property
    def exposed_sharded(self) -> float:
        """Seconds of a reduce-scatter and an all-gather that backward and forward cannot hide."""
        return least_exposed_sharded(min(self.all_reduce), median(self.backward), median(self.forward), self.sizes)

    def sharded_bound(self, plain: bool) -> float:
        """The shortest possible step, in seconds, if ranks also divide the optimizer's work.

        By a reduce-scatter during backward, a step on one shard, and an all-gather during the next forward.
        """
        saved = median(self.optimizer) * (1 - 1 / self.ranks)
        return median(self.steps[UNSYNCHRONISED + PLAIN * plain]) - saved + self.exposed_sharded

    def hidden(self, peer: str) -> float:
        """How much of an all-reduce a peer hides, as a share of the part that can be hidden.

        1 at the bound, 0 for an all-reduce after backward. Below 0 if the peer sends or waits for more. Above 1 if
        forward hides communication too, or the optimizer has less to do.
        """
        all_reduce = min(self.all_reduce)
        alone = self.steps[UNSYNCHRONISED + PLAIN * peer.endswith(PLAIN)]
        added = median([step - least for step, least in zip(self.steps[peer], alone, strict=True)])
        return (all_reduce - added) / (all_reduce - self.exposed)


def described(case: Case, measured: Measured) -> str:
    """Return the table of one case, with its heading."""
    shipped = measured.steps[SHIPPED]
    lines = [["peer", "step ms", "of ddp's", "hidden", "busy ms", "backward ms", "then ms"]]
    for peer, steps in measured.steps.items():
        passes = measured.passes.get(peer, [])
        lines.append(
            [
                peer,
                f"{median(steps) * 1e3:.0f}",
                f"{paired_ratio(steps, shipped):.3f}",
                "" if peer.startswith(UNSYNCHRONISED) else f"{measured.hidden(peer):.0%}",
                f"{median(measured.busy[peer]) * 1e3:.0f}",
                *(f"{median(times) * 1e3:.0f}" for times in zip(*passes, strict=True)),
                *([] if passes else ["", ""]),
            ]
        )
    for plain in (False, True):
        if UNSYNCHRONISED + PLAIN * plain in measured.steps:
            bounds = {
                BOUND: measured.bound(plain),
                HALF_BOUND: measured.half_bound(plain),
                SHARDED_BOUND: measured.sharded_bound(plain),
            }
            for name, bound in bounds.items():
                share = "100%" if name == BOUND else ""
                cells = [f"{bound * 1e3:.0f}", f"{bound / median(shipped):.3f}", share, "", "", ""]
                lines.append([name + PLAIN * plain, *cells])
    head = (
        f"{case.name}: {case.rate:g} Gbit/s, backward / all-reduce {case.ratio:.2f}; {case.forward_ms:.1f} ms forward "
        f"and {case.backward_ms:.1f} ms backward a layer; ranks on each host: {measured.ranks // 2}\n"
        f"all-reduce of all gradients, {NBYTES / 1e6:.0f} MB in one piece: {median(measured.all_reduce) * 1e3:.0f} ms "
        f"(fastest {min(measured.all_reduce) * 1e3:.0f}, {wire_seconds(case.rate) * 1e3:.0f} at the link's rate); "
        f"backward: {median(measured.backward) * 1e3:.0f} ms, forward: {median(measured.forward) * 1e3:.0f} ms, "
        f"optimizer: {median(measured.optimizer) * 1e3:.0f} ms\n"
        f"not to be hidden: {measured.exposed * 1e3:.0f} ms of an all-reduce, "
        f"{measured.exposed_sharded * 1e3:.0f} ms of a reduce-scatter and an all-gather"
    )
    skipped = "".join(f"\nnot run: {peer}: {reason}" for peer, reason in measured.skipped.items())
    return f"{head}\n{table(lines)}{skipped}\n"


NOTES = """\
of ddp's: median over rounds of the step's time / that of Lightning's ddp as shipped in the same round
hidden: share of the part of an all-reduce that backward can hide; 0 % for an all-reduce after backward, less if a peer
        sends or waits for more, over 100 % if forward hides some too or the optimizer's work is divided
bound for a sharded optimizer: the unsynchronised step with the optimizer's work divided, plus the parts of a
        reduce-scatter and an all-gather that backward and forward cannot hide
busy: processor time of all ranks in a step
backward, then: from this package's last_pass(): backward, and from its end until gradients were published
FairScale's ShardedDDP runs with torch 2.13 on gloo as it is; gradients must be cleared with its own zero_grad()
"""


def drawn_reference(case: Case, measured: Measured) -> Any:
    """The step time of each peer as horizontal bars: Trainers above, plain loops below."""
    pyplot = plots()
    groups = [
        [peer for peer in measured.steps if peer.endswith(PLAIN) == plain and not peer.startswith(UNSYNCHRONISED)]
        for plain in (False, True)
    ]
    shown = [(peers, plain) for peers, plain in zip(groups, (False, True), strict=True) if peers]
    heights = [len(peers) for peers, _ in shown]
    figure, panels = pyplot.subplots(
        len(shown),
        1,
        sharex=True,
        squeeze=False,
        figsize=(8, 1.6 + 0.3 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
    )
    for panel, (peers, plain) in zip(panels[:, 0], shown, strict=True):
        for at, peer in enumerate(peers):
            steps = [step * 1e3 for step in measured.steps[peer]]
            middle = median(steps)
            spread = [[middle - min(steps)], [max(steps) - middle]]
            panel.barh(at, middle, xerr=spread, color="C0" if _is_ours(peer) else "0.7", error_kw={"elinewidth": 0.8})
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # hides the lines of bounds
            panel.text(max(steps) + 5, at, f"{middle:.0f}", va="center", fontsize=8, bbox=behind)
        alone = median(measured.steps[UNSYNCHRONISED + PLAIN * plain]) * 1e3
        panel.axvline(alone, color="C2", label=f"step without synchronisation: {alone:.0f} ms")
        bound = measured.bound(plain) * 1e3
        panel.axvline(bound, color="C3", linestyle="--", label=f"least with an all-reduce: {bound:.0f} ms")
        bound = measured.sharded_bound(plain) * 1e3
        panel.axvline(bound, color="C1", linestyle="-.", label=f"least with a sharded optimizer: {bound:.0f} ms")
        bound = measured.half_bound(plain) * 1e3
        panel.axvline(bound, color="C4", linestyle=":", label=f"least with an all-reduce in 16 bits: {bound:.0f} ms")
        panel.set_yticks(range(len(peers)), [peer.removesuffix(PLAIN) for peer in peers])
        panel.invert_yaxis()
        panel.set_ylabel("wrappers in a plain loop" if plain else "strategies in a Trainer")
        panel.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8)
    panels[-1][0].set_xlabel("median step time in ms; whiskers: fastest and slowest round")
    figure.suptitle(
        f"Step time over a link of {case.rate:g} Gbit/s, {NBYTES / 1e6:.0f} MB of gradients: shorter is better"
    )
    figure.tight_layout()
    return figure


def _is_ours(peer: str) -> bool:
    return peer.lower().startswith("bucketddp")
