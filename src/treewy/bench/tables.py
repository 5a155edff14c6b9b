"""The tables of a kernel benchmark, for the screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from treewy.bench.peers import RIVAL
from treewy.bench.records import Case, Record, Results

BARS: dict[Case, dict[int, float]] = {
    "verify": {1: 0.40, 8: 0.36, 32: 0.28, 64: 0.25, 128: 0.23, 256: 0.22},
    "deferred": {1: 0.50, 8: 0.50, 32: 0.34, 64: 0.30, 128: 0.28, 256: 0.265},
    "reconstruct": {1: 0.60, 8: 0.60, 32: 0.55, 64: 0.48, 128: 0.44, 256: 0.40},
}
"""Most that 4 rows may take of the time of vLLM's store-all op, by batch."""
OVER_FLOOR = {4: 1.30, 15: 1.40, 40: 1.50}
"""Most that a verify may take of its floor from batch 64 on, by rows."""
OVER_CHAIN = {15: 1.25, 40: 1.80}
"""Most that a verify may take of the time of 4 rows up to batch 8, by rows."""
OVER_WALK = {15: 1 / 8, 40: 1 / 15}
"""Most that a whole round may take of SGLang's walk over the same tree, which stores a state a row."""
HEADS_MARGIN = 1.05
"""48 and 64 value heads may miss the bars by this factor."""

WALK = "sglang store_all"


def tables(results: Results) -> Iterator[Table]:
    """All tables that have a row, the failures last."""
    records = results.records
    for with_conv in (False, True):
        title = "The whole step" if with_conv else "After the convolution"
        yield from _filled(_against_store_all(f"{title}, 4 rows", records, with_conv))
    yield from _filled(_floors(records))
    yield from _filled(_trees(records))
    yield from _filled(_decode(records))
    yield from _filled(_rivals(records))
    yield from _filled(_others(records))
    yield from _filled(_checks(results))
    yield from _filled(_refused(results))


@dataclass(frozen=True)
class Verdict:
    """A ratio beside its bar."""

    ratio: float
    bar: float | None

    def text(self) -> Text:
        """Green where it is met, red where it is not."""
        shown = f"{self.ratio:.3f}"
        if self.bar is None:
            return Text(shown)
        met = self.ratio <= self.bar
        return Text(f"{shown} {'<=' if met else '> '} {self.bar:.3f}", style="green" if met else "red")


def chain_verdict(record: Record) -> Verdict | None:
    """Of 4 rows against vLLM's op; None where there is nothing to compare."""
    if record.rows != 4 or record.ratio is None or record.with_commit:
        return None
    bar = BARS.get(record.case, {}).get(record.batch)
    if bar is not None and record.heads[1] != 32:
        bar *= HEADS_MARGIN
    return Verdict(record.ratio, bar)


def floor_verdict(record: Record) -> Verdict | None:
    """Of a verify without folds against its floor."""
    if record.case != "verify" or record.over_floor is None or record.with_commit:
        return None
    return Verdict(record.over_floor, OVER_FLOOR.get(record.rows) if record.batch >= 64 else None)


def _filled(table: Table) -> Iterator[Table]:
    if table.row_count:
        yield table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    return table


def _name(record: Record) -> str:
    return f"{record.case}{', whole round' if record.with_commit and record.case != 'commit' else ''}"


def _kind(record: Record) -> str:
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[record.state_dtype]
    return dtype if record.heads[1] == 32 else f"{dtype}, HV {record.heads[1]}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(record: Record) -> str:
    return f"{100 * record.spread:.1f} %"


def _against_store_all(title: str, records: Sequence[Record], with_conv: bool) -> Table:
    table = _table(
        f"{title}: time over vLLM's fused store-all op, limit", "case", "impl", "state", "B", "us", "vLLM us", "ratio",
        "floor us", "x floor", "spread",
    )  # fmt: skip
    for record in records:
        verdict = chain_verdict(record)
        if verdict is None or record.with_conv != with_conv:
            continue
        over = "-" if record.over_floor is None else f"{record.over_floor:.2f}"
        table.add_row(
            record.case, record.impl, _kind(record), str(record.batch), _us(record.us), _us(record.baseline_us),
            verdict.text(), _us(record.floor_us), over, _spread(record),
        )  # fmt: skip
    return table


def _floors(records: Sequence[Record]) -> Table:
    table = _table(
        "Distance to the roof: verify, 8 pending rows, no fold", "rows", "impl", "state", "B", "us", "floor us",
        "x floor", "x 4 rows",
    )  # fmt: skip
    verifies = [r for r in records if r.case == "verify" and not r.with_conv and not r.with_commit]
    chain = {(r.impl, r.state_dtype, r.heads, r.batch): r.us for r in verifies if r.rows == 4}
    for record in sorted(verifies, key=lambda r: (r.rows, r.impl, r.state_dtype, r.heads, r.batch)):
        verdict = floor_verdict(record)
        four = chain.get((record.impl, record.state_dtype, record.heads, record.batch))
        beside: Text | str = "-"
        if four is not None and record.rows > 4:
            beside = Verdict(record.us / four, OVER_CHAIN.get(record.rows) if record.batch <= 8 else None).text()
        table.add_row(
            str(record.rows), record.impl, _kind(record), str(record.batch), _us(record.us), _us(record.floor_us),
            "-" if verdict is None else verdict.text(), beside,
        )  # fmt: skip
    return table


def _trees(records: Sequence[Record]) -> Table:
    table = _table(
        "Whole rounds of trees, and of store-all beside them", "case", "impl", "rows", "B", "us", "SGLang's walk us",
        "ratio", "spread",
    )  # fmt: skip
    walks = {
        (r.rows, r.batch): r.us for r in records if r.impl == WALK and r.with_commit and r.state_dtype == "bfloat16"
    }
    for record in records:
        if record.rows not in OVER_WALK or record.case == "commit" or not record.with_commit:
            continue
        walk = walks.get((record.rows, record.batch))
        bar = OVER_WALK[record.rows] if record.case == "deferred" else None
        ratio = "-" if walk is None else Verdict(record.us / walk, bar).text()
        table.add_row(
            record.case, record.impl, str(record.rows), str(record.batch), _us(record.us), _us(walk), ratio,
            _spread(record),
        )  # fmt: skip
    return table


def _decode(records: Sequence[Record]) -> Table:
    table = _table(
        "Plain decoding, one row", "case", "impl", "conv", "norm", "B", "us", "vLLM us", "ratio", "x floor", "spread"
    )
    for record in records:
        if record.rows != 1:
            continue
        table.add_row(
            _name(record), record.impl, "yes" if record.with_conv else "", "yes" if record.with_norm else "",
            str(record.batch), _us(record.us), _us(record.baseline_us),
            "-" if record.ratio is None else f"{record.ratio:.3f}",
            "-" if record.over_floor is None else f"{record.over_floor:.2f}", _spread(record),
        )  # fmt: skip
    return table


def rivals(records: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    """Each peer's time of a chain with this package's best in the same work, the gated norm always inside ours."""
    for peer in records:
        if peer.case != "peer" or peer.rows != 4:
            continue
        case = RIVAL[peer.impl]
        if peer.impl == "sglang replay":
            case = "verify" if not peer.with_commit else "deferred" if peer.state_dtype == "float32" else case
        ours = [
            r for r in records
            if r.case == case
            and (r.batch, r.rows, r.heads, r.state_dtype, r.with_conv)
            == (peer.batch, peer.rows, peer.heads, peer.state_dtype, peer.with_conv)
            and r.with_commit == (peer.with_commit and case != "verify")
        ]  # fmt: skip
        if ours:
            yield peer, min(ours, key=lambda r: r.us)


def _rivals(records: Sequence[Record]) -> Table:
    table = _table(
        "Every other kernel for a chain of 4 rows, and ours in the same work", "peer", "ours", "state", "conv", "B",
        "peer us", "ours us", "ours / peer",
    )  # fmt: skip
    for peer, ours in rivals(records):
        name = f"{peer.impl}{', whole round' if peer.with_commit else ''}"
        table.add_row(
            name, f"{_name(ours)}, {ours.impl}", _kind(peer), "yes" if peer.with_conv else "", str(peer.batch),
            _us(peer.us), _us(ours.us), Verdict(ours.us / peer.us, 1.0).text(),
        )  # fmt: skip
    return table


def _others(records: Sequence[Record]) -> Table:
    table = _table("Commits and whole rounds", "case", "impl", "rows", "state", "B", "us", "floor us", "spread")
    commits = set()
    for record in records:
        if record.case == "commit":  # timed with jobs with and without convolution, and it is the same commit
            key = (record.impl, record.rows, record.state_dtype, record.heads, record.batch)
            if key in commits:
                continue
            commits.add(key)
        whole = record.with_commit and record.case in ("deferred", "reconstruct") and record.rows == 4
        if record.case == "commit" or (whole and not record.with_conv):
            table.add_row(
                _name(record), record.impl, str(record.rows), _kind(record), str(record.batch), _us(record.us),
                _us(record.floor_us), _spread(record),
            )  # fmt: skip
    return table


def _checks(results: Results) -> Table:
    table = _table("Outputs beside float64", "case", "impl", "rows", "state", "HV", "rounds", "error", "tolerance")
    for check in results.checks:
        style = "" if check.passed else "red"
        table.add_row(
            f"{check.case}{' with conv' if check.with_conv else ''}", check.impl, str(check.rows), check.state_dtype,
            str(check.heads[1]), str(check.rounds), Text(f"{check.error:.2g}", style=style), f"{check.tolerance:g}",
        )  # fmt: skip
    return table


def _refused(results: Results) -> Table:
    table = Table(title="Not timed", title_justify="left")
    table.add_column("what")
    table.add_column("why", overflow="fold")
    for refused in results.refused:
        table.add_row(refused.what, refused.reason)
    return table


def summary(results: Results) -> str:
    """Machine, versions and what became of the run, in a few lines."""
    verdicts: Iterable[Verdict | None] = [chain_verdict(r) for r in results.records]
    barred = [v for v in verdicts if v is not None and v.bar is not None]
    met = sum(v.ratio <= (v.bar or 0) for v in barred)
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    ended = "" if results.complete else "; the budget ended before the run did"
    return (
        f"{results.machine.gpu or 'no GPU'}, driver {results.machine.driver or '-'}, {results.date}\n{versions}\n"
        f"copy {results.copy_bytes_per_s / 1e12:.2f} TB/s; {len(results.records)} times, {len(results.checks)} checks, "
        f"{len(results.refused)} refusals in {results.seconds:.0f} s{ended}\n"
        f"{met} of {len(barred)} limits against vLLM's store-all op met"
    )
