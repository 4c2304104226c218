"""Average gradients over processes, whatever device each lies on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

BUCKET_BYTES = 64 * 2**20


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """All-reduce the gradients of all trainable parameters in the default process group, as DDP does.

    Each is divided by the number of processes and then summed. A parameter without a gradient here counts as
    zero, so that all processes reduce the same list. Tensors of one device and dtype travel together.
    """
    world = dist.get_world_size()
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            alike[parameter.grad.device, parameter.grad.dtype].append(parameter.grad)
    for gradients in alike.values():
        for bucket in _buckets(gradients):
            flat = _flatten_dense_tensors(bucket).div_(world)
            dist.all_reduce(flat)
            for gradient, reduced in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(reduced)


def _buckets(gradients: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
