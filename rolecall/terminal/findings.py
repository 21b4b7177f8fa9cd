"""The report of `rolecall diagnose` as text. Pure."""

from rich.console import Group, RenderableType
from rich.text import Text

from rolecall.core.diagnosis import NO_TIME, Diagnosis
from rolecall.core.text import counted, iso_utc, plain
from rolecall.diagnose.diagnose import CANNOT_TELL, DiagnosisReport
from rolecall.terminal.console import BAD, GOOD, PLAIN, SOFT, WARN, Indented


def report(answer: DiagnosisReport) -> RenderableType:
    """Each finding with its evidence, or `healthy`, followed by the inputs."""
    parts: list[RenderableType] = []

    def add(indent: int, *pieces: tuple[str, str]) -> None:
        parts.append(Indented(Text.assemble(*((plain(text), style) for text, style in pieces)), indent, indent + 4))

    for found in answer.diagnoses:
        add(0, (_when(found), SOFT), (" ", PLAIN), (found.fault_class, BAD), (f": {found.because}", PLAIN))
        for evidence in found.evidence:
            add(4, (evidence.text, PLAIN))
        if found.settle:
            add(4, ("to settle it: ", WARN), (found.settle, PLAIN))
        if found.advice:
            add(4, ("advice: ", GOOD), (found.advice, PLAIN))
    if answer.diagnoses:
        add(0, (counted(len(answer.diagnoses), "finding"), BAD), (" in", PLAIN))
    elif answer.open_ends:
        add(0, ("nothing found, but not everything could be checked,", WARN), (" in", PLAIN))
    else:
        add(0, ("healthy:", GOOD), (" nothing found in", PLAIN))
    for source in answer.inputs:
        add(4, (f"{source.path}: {source.content}", PLAIN))
        for remark in source.remarks:
            add(8, (remark, WARN if remark.startswith(CANNOT_TELL) else SOFT))
    for effect in answer.smallest_effects:
        if effect.is_complete:
            add(4, (effect.text, SOFT))
    if not_found := dict.fromkeys(e.panel for e in answer.smallest_effects if not e.is_complete):
        add(
            4,
            (
                f"the smallest detectable shift was not measured (too little time): {', '.join(not_found)}",
                SOFT,
            ),
        )
    return Group(*parts)


def _when(d: Diagnosis) -> str:
    if any(e.kind == NO_TIME for e in d.evidence):
        return "at an unknown time"
    text = iso_utc(d.detected_at)
    return f"at {text}" if text.endswith(" s") else text
