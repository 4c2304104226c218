"""A request for encoding, named completely: two requests with one key have the same embeddings, bit for
bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wanshim.core.encoding.cache import FORMAT
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.files import Folder, content_digest, known_digest, scan, sha256_json
from wanshim.core.encoding.identity import code_identity, value_identity
from wanshim.errors import WanshimError


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSource:
    """One text encoder and everything that turns a prompt into its output.

    Args:
        encoder: folder of the encoder's configuration and weights.
        tokenizer: folder of its tokenizer.
        tokenizer_args: keyword arguments of the tokenizer call; plain JSON values.
        precision: the encoder's computing precision, as the framework names it ("fp32", "bf16", ...).
        process: the framework's functions around the encoder, in order (preprocessing, postprocessing).
        output_dtype: dtype of the embeddings handed out.
        settings: what the framework itself sets of this encoder, beside the files of its folder.
    """

    encoder: Path
    tokenizer: Path
    tokenizer_args: Mapping[str, Any]
    precision: str
    process: Sequence[Callable[..., Any]] = ()
    output_dtype: torch.dtype = torch.bfloat16
    settings: object = None

    def described(self) -> dict[str, Any]:
        return {
            "tokenizer_args": dict(self.tokenizer_args),
            "precision": self.precision,
            "process": [code_identity(function) for function in self.process],
            "output_dtype": str(self.output_dtype),
            "settings": value_identity(self.settings),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingRequest:
    """A prompt, the encoders it goes through, and the code that runs them.

    Args:
        prompt: the text, exactly as the framework would encode it.
        sources: the encoders in the framework's order.
        implementation: names and versions of what computes ("fastvideo": "0.2.0", ...), because another
            release may round differently.
    """

    prompt: str
    sources: tuple[EncoderSource, ...]
    implementation: Mapping[str, str] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Everything but the files, as plain JSON.

        Raises:
            WanshimError: an argument has no exact JSON form, so it could not be distinguished from another.
        """
        described = {
            "prompt": self.prompt,
            "sources": [source.described() for source in self.sources],
            "implementation": dict(self.implementation),
        }
        try:
            json.dumps(described)
        except TypeError as error:
            raise WanshimError(
                f"An argument of this encoding cannot be named in a cache key ({error})",
                expected="text, numbers, booleans, None, and lists and mappings of them",
                hint="Use mode='per_rank', which needs no key",
            ) from error
        return described

    def folders(self) -> tuple[Folder, ...]:
        """The encoder and tokenizer folders as they are now; opens no file."""
        return tuple(scan(path) for source in self.sources for path in (source.encoder, source.tokenizer))


@dataclass(frozen=True, slots=True)
class KeyMaker:
    """Makes the keys of one request, for embeddings that one kind of device computes.

    `turn` names the request before any file was read, so that ranks can agree on who reads them; `key` is
    made from the files' contents, so that a moved or touched checkpoint keeps its embeddings.
    """

    request: EncodingRequest
    numerics: Mapping[str, str]
    folders: tuple[Folder, ...]

    @property
    def turn(self) -> str:
        return self._hash([folder.token for folder in self.folders])

    def known_key(self, directory: CacheDirectory) -> str | None:
        """The key, if every folder's content is already known; opens no file of the encoder."""
        digests = [known_digest(folder, directory) for folder in self.folders]
        return None if None in digests else self._hash(digests)

    def key(self, directory: CacheDirectory) -> str:
        """The key; reads each folder whose content is not known."""
        return self._hash([known_digest(f, directory) or content_digest(f, directory) for f in self.folders])

    def description(self) -> dict[str, Any]:
        return {**self.request.described(), "numerics": dict(self.numerics)}

    def _hash(self, files: Sequence[str | None]) -> str:
        return sha256_json({"format": FORMAT, "files": list(files), **self.description()})


def numerics(device: torch.device) -> dict[str, str]:
    """The kind of `device` and torch's settings, which decide the last bits of a result beside the code."""
    if device.type == "cpu":
        kind = torch.backends.cpu.get_cpu_capability()
        matmul: Any = torch.backends.mkldnn.matmul
    else:
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        matmul = torch.backends.cuda.matmul
    autocast = torch.is_autocast_enabled(device.type)
    return {
        "device": f"{device.type} {kind}".strip(),
        "torch": torch.__version__,
        "matmul": matmul.fp32_precision,  # follows both of torch's switches; the getter of the older one may raise
        "autocast": str(torch.get_autocast_dtype(device.type)) if autocast else "off",
    }
