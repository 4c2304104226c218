"""Imported last by a fork server: its objects stay shared, where the collector of each fork would copy them all."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
