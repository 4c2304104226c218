"""The tables of docs/measured/training.md on splits, pipelines, offload and streaming, from the raw records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from writers import measured
from writers.markdown import table

Arm = Mapping[str, Any]


def _where(name: str, record: Mapping[str, Any]) -> str:
    commit = measured.commit_of(dict(record))
    made_by = f"benchmarks/{record['benchmark'].replace('_lanes', '_pipeline')}.py"
    where = f"`benchmarks/results/{name}.json`, by `{made_by}`"
    return f"{record['gpu']}, torch {record['torch']}, commit {commit}: {where}."


def _each(values: Mapping[str, float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values.values())


def pipeline_table() -> str:
    """Micro-batches over the stages of a split at once."""
    rows: list[tuple[object, ...]] = []
    notes = []
    for count in (2, 4):
        name = f"model_split_lanes_{count}xH200"
        record = measured.result(name)
        for micro_batches, arm in record["lanes"].items():
            gain = f"{arm['speed_up']:.2f}x", f"{arm['bound']:.2f}x"
            rows.append((count, micro_batches, f"{arm['median']:.2f}", *gain, _each(arm["peak_GiB"])))
        equal = f"{record['gradients_equal']} gradients equal bit for bit"
        notes.append(f"{count} GPUs: {equal}. {_where(name, record)}")
    heads = "GPUs | micro-batches | seconds | of one GPU's speed | bound | peak GiB by GPU"
    return table(heads, rows, "\n".join(f"- {note}" for note in notes))


def pipeline_offload_table() -> str:
    """Four micro-batches, checkpoints on the GPUs or in host memory."""
    name = "model_split_lanes_offload_2xH200"
    record = {key: arm for key, arm in measured.result(name).items() if isinstance(arm, dict) and "lanes" in arm}
    rows: list[tuple[object, ...]] = []
    for title, one in record.items():
        arm = one["lanes"]["4"]
        predicted = _each(one["predicted_GiB"]) if "predicted_GiB" in one else ""
        rows.append((title, f"{arm['median']:.2f}", f"{arm['speed_up']:.2f}x", _each(arm["peak_GiB"]), predicted))
    heads = "checkpoint inputs | seconds | of one GPU's speed | peak GiB by GPU | predicted"
    return table(heads, rows, _where(name, next(iter(record.values()))))


def capacity_table() -> str:
    """One micro-batch over two GPUs: whole, and with checkpoints offloaded."""
    rows: list[tuple[object, ...]] = []
    notes = []
    for base in ("bf16", "fp8"):
        name = f"model_split_capacity_offload_{base}_2xH200"
        record = measured.result(name)
        for title, arm in record["arms"].items():
            rows.append((base, title, *((arm, *[""] * 4) if isinstance(arm, str) else _capacity(arm))))
        notes.append(f"- {_where(name, record)}")
    heads = "base | what differs | seconds | predicted GiB | allocated | reserved | equal gradients"
    return table(heads, rows, "\n".join(notes))


def _capacity(arm: Arm) -> tuple[str, ...]:
    predicted = _each(arm["predicted_GiB"]) if "predicted_GiB" in arm else ""
    sizes = predicted, _each(arm["allocated_GiB"]), _each(arm["reserved_GiB"])
    return f"{arm['seconds'][0]:.2f}", *sizes, arm.get("against_plain", {}).get("gradients_equal", "")


def offload_table() -> str:
    """One GPU: where gradient checkpoints wait."""
    name = "checkpoint_offload_1xH200"
    record = measured.result(name)
    alone = record["nothing offloaded"]["seconds"]
    arms = ("nothing offloaded", "wanshim's offload", "save_on_cpu")
    rows: list[tuple[object, ...]] = [
        (
            arm,
            f"{record[arm]['seconds']:.2f}",
            f"{record[arm]['seconds'] / alone:.2f}",
            f"{record[arm]['peak_GiB']:.2f}",
        )
        for arm in arms
    ]
    note = f"Equal bit for bit: {record['tensors_equal']} tensors. Host link {record['link_GB_s']} GB/s."
    heads = "gradient checkpoints | seconds | against none | peak GiB"
    return table(heads, rows, f"{note} {_where(name, record)}")


def streaming_table() -> str:
    """Data parallel over two GPUs, frozen weights on the GPUs or half of them in host memory."""
    name = "model_split_streaming_2xH200"
    record = measured.result(name)
    alone = record["one GPU, nothing offloaded"]["median"]
    gains = {
        "one GPU, nothing offloaded": 1.0,
        "DDP, base resident": 2 * alone / record["DDP, base resident"]["median"],
    }
    gains["DDP, half streamed"] = record["per_sample_gain_over_one_GPU"]
    rows: list[tuple[object, ...]] = [
        (arm, f"{record[arm]['median']:.2f}", f"{gain:.2f}x", f"{record[arm]['peak_GiB']:.2f}")
        for arm, gain in gains.items()
    ]
    link = record["link"]
    note = (
        f"Equal bit for bit: {record['streamed DDP, loss and gradients']} tensors. {link['late']} of {link['loads']} "
        f"copies were not ahead of use. Setting it up took {record['setup_seconds']['all']:.1f} s."
    )
    heads = "plan | seconds a step | samples a second against one GPU | peak GiB a GPU"
    return table(heads, rows, f"{note} {_where(name, record)}")


def model_table() -> str:
    """Sequence parallel on the model alone, beside other ways to divide a sample."""
    rows: list[tuple[object, ...]] = []
    names = [f"sequence_{size}p_{count}xH200" for size in (480, 720) for count in (2, 4)]
    for name in names:
        record = measured.result(name)
        video = "{height}x{width}x{frames}".format(**record["arguments"])
        for title, arm in record["arms"].items():
            distance = arm["gradient_distance"]
            cells = f"{arm['median']:.2f}", f"{arm['times_one_GPU']:.2f}x", f"{arm['peak_GiB']:.1f}"
            gpus = 1 if title == "one GPU" else record["ranks"]
            rows.append((video, gpus, title, *cells, f"{distance['median']:.2%}", f"{distance['farthest']:.2%}"))
    note = "\n".join(f"- {_where(name, measured.result(name))}" for name in names)
    heads = "video | GPUs | arm | seconds | speed | GiB a GPU | median gradient's distance | farthest"
    return table(heads, rows, note)


def prompt_table() -> str:
    """The negative prompt on two ranks: FastVideo's way, and one rank that keeps the result."""
    name = "prompt_encoding_2xh200"
    record = measured.result(name)
    titles = {
        "upstream": "FastVideo 0.2: every rank encodes",
        "cold": "wanshim, first start: one rank encodes",
        "layers": "wanshim, first start, layer by layer",
        "warm": "wanshim, every later start",
    }
    rows: list[tuple[object, ...]] = [
        (title, f"{record['arms'][arm]['seconds']:.3f}", *(f"{peak:.3f}" for peak in record["arms"][arm]["peak_GB"]))
        for arm, title in titles.items()
    ]
    assert all(record["equal_to_upstream"].values())
    return table(
        "start | seconds | peak GB, rank 0 | peak GB, rank 1", rows, f"All equal bit for bit. {_where(name, record)}"
    )
