"""`wanshim demo resume`: a training is killed, goes on by the same command, and is compared with one that was not."""

from __future__ import annotations

from pathlib import Path

from wanshim.demo import clip
from wanshim.demo.comparison import check_installed
from wanshim.demo.train import ACCUMULATION, ALONE, PACKAGES, Way, arguments, console, train

RESUMED = Way("resumed", {"WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"})


def run(*, steps: int, output: Path, video: Path | None) -> None:
    """A DiffSynth training is killed and goes on by the same command; compared with one that was not killed."""
    # It is killed in the first micro-batch of the last step but one. States of an earlier demo in the folder are left.
    check_installed(*PACKAGES)
    import torch
    from safetensors.torch import load_file

    job = arguments(output, clip.find(video), 9, steps)
    folder = output / RESUMED.title
    whole = train(ALONE, job, output / ALONE.title, steps)
    anew = Way("killed", RESUMED.variables | {"WANSHIM_RESUME": "new"})
    killed = train(anew, job, folder, steps, kill_after=max(1, (steps - 2) * ACCUMULATION + 1))
    resumed = train(RESUMED, job, folder, steps)
    again = whole.losses[len(whole.losses) - len(resumed.losses) :]
    same = killed.losses == whole.losses[: len(killed.losses)] and resumed.losses == again
    theirs, ours = load_file(whole.lora), load_file(resumed.lora)
    equal = sum(torch.equal(ours[name], tensor) for name, tensor in theirs.items() if name in ours)
    notes = [note for row in resumed.features for note in row["notes"] if "from step" in note]
    console.print(f"\nkilled      in micro-batch {len(killed.losses)} of {len(whole.losses)}")
    console.print(f"resumed     {notes[0] if notes else 'not from a state'}", highlight=False)
    console.print(f"losses      {'equal' if same else 'DIFFER'}, {len(resumed.losses)} micro-batches after the state")
    console.print(f"LoRA        {equal} of {len(theirs)} tensors equal bit for bit: {resumed.lora}")
    same = same and bool(notes) and equal == len(theirs) == len(ours)
    color, verdict = ("green", "agree") if same else ("red", "DIFFER")
    console.print(f"[{color}]the resumed training and the undisturbed one {verdict}[/]")
    if not same:
        raise SystemExit(1)
