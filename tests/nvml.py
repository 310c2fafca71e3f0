"""A library that answers as NVIDIA's NVML does, through the same C interface: three GPUs, or what a test defines."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#include <string.h>
#include <stdio.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } process_t;
typedef struct { unsigned gpu, memory; } utilization_t;

int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(long)(100 + i); return i == BROKEN ? 15 : 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) {
  long i = (long)h; snprintf(s, n, i >= 1000 ? "MIG-%ld" : "GPU-%ld", i); return 0; }
int nvmlDeviceGetHandleByUUID(const char *s, void **h) {
  long i = 0;
  if (sscanf(s, "GPU-%ld", &i) != 1 && sscanf(s, "MIG-%ld", &i) != 1) return 6;
  *h = (void *)i; return i < 1000 && i >= 100 + COUNT ? 6 : i == 100 + BROKEN ? 15 : 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) { snprintf(s, n, "NVIDIA Test %ld", (long)h); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { m->total = TOTAL * 1048576ULL; m->used = 3ULL << 30; return 0; }
#ifdef USE
int nvmlDeviceGetUtilizationRates(void *h, utilization_t *u) {
  u->gpu = USE; u->memory = 55; return (long)h >= 1000 ? 3 : 0; }
#endif
#ifdef CLOCK
int nvmlDeviceGetClockInfo(void *h, unsigned kind, unsigned *mhz) { *mhz = CLOCK + kind; return 0; }
int nvmlDeviceGetTemperature(void *h, unsigned kind, unsigned *degrees) { *degrees = 71 + kind; return 0; }
#endif
#ifdef SLOWED
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *bits) { *bits = SLOWED; return 0; }
#endif
#ifdef ERRORS
static unsigned long long looks;
int nvmlDeviceGetTotalEccErrors(void *h, unsigned kind, unsigned since, unsigned long long *n) {
  if (kind != 1 || since != 0) return 2;
  *n = 3 + ERRORS * looks++; return 0; }
#endif
#ifdef LINKS
typedef struct { unsigned field, scope; long long t, took; int type, result; unsigned long long value; } field_t;
static unsigned long long asked;
int nvmlDeviceGetFieldValues(void *h, int n, field_t *f) {
  for (int i = 0; i < n; i++) {
    int data = f[i].field == 138 || f[i].field == 139;
    f[i].result = data ? (f[i].scope == ~0U ? 0 : 2) : f[i].field == 52 ? 0 : 3;
    f[i].value = data ? (f[i].field == 138 ? 2 : 1) * LINKS * asked : 5 + asked;
  }
  asked += n == 2 && f[0].field == 52; return 0; }
#endif
#ifdef XID
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_t;
static void *watched; static int told;
int nvmlEventSetCreate(void **set) { *set = &told; return 0; }
int nvmlEventSetFree(void *set) { return 0; }
int nvmlDeviceRegisterEvents(void *h, unsigned long long types, void *set) {
  watched = h; return types == 8 && set == &told ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, event_t *e, unsigned ms) {
  if (!watched || told || ms || set != &told) return 10;
  told = 1; e->device = watched; e->type = 8; e->data = XID; return 0; }
#endif
#ifdef MIG
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) { *now = *later = (long)h == MIG; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **part) {
  *part = (void *)((long)h * 10 + i); return i < 2 ? 0 : 6; }
#endif
#ifdef PROCESSES
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_t *p) {
  if ((long)h != 101) { *n = 0; return 0; }
  p[0].pid = PID; p[0].memory = HELD; p[1].pid = 4712; p[1].memory = ~0ULL; *n = 2; return PROCESSES; }
#endif
"""

GPUS = {"INIT": 0, "COUNT": 3, "BROKEN": -1, "PID": 4711, "HELD": 2 << 30, "TOTAL": 80 << 10}  # MiB


def compilation(library: str, **defines: int) -> tuple[list[str], str]:
    """The command that makes the library, and its input. Skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    words = [f"-D{name}={value}" for name, value in {**GPUS, **defines}.items()]
    return [compiler, "-shared", "-fPIC", "-w", *words, "-o", library, "-x", "c", "-"], _SOURCE


def compiled(directory: Path, **defines: int) -> Path:
    """The library, in ``directory``; a process that has loaded one keeps it."""
    library = directory / "nvml.so"
    command, source = compilation(str(library), **defines)
    subprocess.run(command, input=source, text=True, check=True)
    return library
