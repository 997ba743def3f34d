/* driver.c - the mock of the NVIDIA driver (host.h), with the functions that `kvant bench cuda` and
 * the llama.cpp plug-in call. Memory is the computer's memory, and work is done when it is
 * enqueued. A stream that cuStreamCreate made can be captured: its work is then recorded
 * (record.c), and done when the graph is launched.
 *
 * There are two GPUs. Memory and streams belong to the GPU whose context is current, and work on
 * memory of another GPU fails. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <time.h>

#include "internal.h"

typedef unsigned long long address;

enum { MOST_SPANS = 4096, N_DEVICES = 2, ELSEWHERE = 1 };

static bool runs;
static char contexts[N_DEVICES];
static _Thread_local void *current; /* a context; NULL for a program that uses none */
static struct span {
    const char *at;
    size_t bytes;
    void *context;
} spans[MOST_SPANS];
/* contexts may have their own threads */
static pthread_mutex_t spans_lock = PTHREAD_MUTEX_INITIALIZER;

void *host_context(void)
{
    return current;
}

bool host_is_here(const void *memory)
{
    const char *at = memory;
    bool here = true; /* set by a test */

    pthread_mutex_lock(&spans_lock);
    for (int i = 0; i < MOST_SPANS; i++)
        if (spans[i].at && at >= spans[i].at && at < spans[i].at + spans[i].bytes) {
            here = spans[i].context == current;
            break;
        }
    pthread_mutex_unlock(&spans_lock);
    return here;
}

static void note(const void *at, size_t bytes)
{
    int i = 0;

    pthread_mutex_lock(&spans_lock);
    while (spans[i].at)
        i++;
    spans[i] = (struct span){ at, bytes, current };
    pthread_mutex_unlock(&spans_lock);
}

bool host_driver_runs(void)
{
    return runs;
}

EXPORT(int, cuInit, (unsigned flags))
{
    runs = true;
    return (int)flags;
}

/* One GPU, or two with HOST_CUDA_DEVICES=2, because most tests need one. */
EXPORT(int, cuDeviceGetCount, (int *n))
{
    const char *wanted = getenv("HOST_CUDA_DEVICES");
    *n = wanted && strcmp(wanted, "2") == 0 ? N_DEVICES : 1;
    return 0;
}

EXPORT(int, cuDeviceGet, (int *device, int ordinal))
{
    *device = ordinal;
    return ordinal >= N_DEVICES;
}

EXPORT(int, cuDeviceGetName, (char *name, int bytes, int device))
{
    return snprintf(name, (size_t)bytes, "host GPU %d", device) < 0;
}

EXPORT(int, cuDriverGetVersion, (int *version))
{
    return !(*version = 13000);
}

/* The size of the L2 cache, compute capability 8.6, and the shared memory of such GPUs. */
EXPORT(int, cuDeviceGetAttribute, (int *value, int attribute, int device))
{
    static const int known[][2] = { { 38, 1 << 20 }, { 75, 8 }, { 76, 6 }, { 97, 99 << 10 } };
    for (size_t i = 0; device == 0 && i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) {
            *value = known[i][1];
            return 0;
        }
    return 1;
}

EXPORT(int, cuDevicePrimaryCtxRetain, (void **context, int device))
{
    *context = device < N_DEVICES ? &contexts[device] : NULL;
    return *context == NULL;
}

EXPORT(int, cuCtxSetCurrent, (void *context))
{
    current = context;
    return 0;
}

/* Bytes that were allocated and not freed, on all devices. */
EXPORT(size_t, host_bytes, (void))
{
    size_t bytes = 0;

    pthread_mutex_lock(&spans_lock);
    for (int i = 0; i < MOST_SPANS; i++)
        bytes += spans[i].at ? spans[i].bytes : 0;
    pthread_mutex_unlock(&spans_lock);
    return bytes;
}

/* 32 MiB more than a benchmark leaves free, or the number of bytes in KVANT_TEST_FREE_BYTES. */
EXPORT(int, cuMemGetInfo_v2, (size_t * available, size_t *total))
{
    const char *bytes = getenv("KVANT_TEST_FREE_BYTES");
    *total = (size_t)96 << 20;
    *available = bytes ? (size_t)strtoull(bytes, NULL, 10) : *total;
    return 0;
}

/* KVANT_TEST_NO_MEMORY_AT: whether this call fails. The variable counts down to 0. */
static bool fails_now(void)
{
    const char *at = getenv("KVANT_TEST_NO_MEMORY_AT");
    const long left = at != NULL ? strtol(at, NULL, 10) : 0;
    char number[16];

    if (left <= 0)
        return false;
    snprintf(number, sizeof(number), "%d", (int)left - 1);
    setenv("KVANT_TEST_NO_MEMORY_AT", number, 1);
    return left == 1;
}

/* New memory holds NaN. With KVANT_TEST_NO_MEMORY, no memory is left. */
EXPORT(int, cuMemAlloc_v2, (address * memory, size_t bytes))
{
    if (getenv("KVANT_TEST_NO_MEMORY") != NULL || fails_now())
        return 2;
    void *span = aligned_alloc(256, (bytes + 255) / 256 * 256);
    *memory = (address)(uintptr_t)span;
    if (!span)
        return 2;
    memset(span, 0xff, bytes);
    note(span, bytes);
    return 0;
}

EXPORT(int, cuMemFree_v2, (address memory))
{
    pthread_mutex_lock(&spans_lock);
    for (int i = 0; i < MOST_SPANS; i++)
        if (spans[i].at && spans[i].at == (const char *)(uintptr_t)memory) {
            host_order_frees(spans[i].at, spans[i].bytes);
            spans[i].at = NULL;
        }
    pthread_mutex_unlock(&spans_lock);
    free((void *)(uintptr_t)memory);
    return 0;
}

/* The computer's memory that the driver knows, as far as there is room for it here. */

enum { MOST_KNOWN = 256 };

static struct {
    pthread_mutex_t lock;
    struct {
        const char *at;
        size_t bytes;
    } of[MOST_KNOWN];
} known = { .lock = PTHREAD_MUTEX_INITIALIZER };

static atomic_ulong n_unknown;
static _Thread_local unsigned long n_own_unknown;

/* Gives the entry of memory `from` to memory `to`; NULL: of none, to none. */
static void note_known(const void *from, const void *to, size_t bytes)
{
    int i = 0;
    pthread_mutex_lock(&known.lock);
    while (i < MOST_KNOWN && known.of[i].at != from)
        i++;
    if (i < MOST_KNOWN) {
        known.of[i].at = to;
        known.of[i].bytes = bytes;
    }
    pthread_mutex_unlock(&known.lock);
}

static bool is_known(const char *at)
{
    bool found = false;
    pthread_mutex_lock(&known.lock);
    for (int i = 0; i < MOST_KNOWN && !found; i++)
        found = known.of[i].at && at >= known.of[i].at && at < known.of[i].at + known.of[i].bytes;
    pthread_mutex_unlock(&known.lock);
    return found;
}

EXPORT(int, cuMemHostAlloc, (void **memory, size_t bytes, unsigned flags))
{
    *memory = calloc(1, bytes);
    note_known(NULL, *memory, bytes);
    return flags != 3 || !*memory;
}

EXPORT(int, cuMemFreeHost, (void *memory))
{
    note_known(memory, NULL, 0);
    free(memory);
    return 0;
}

/* How often threads other than this one copied to memory that the driver does not know. */
EXPORT(unsigned long, host_unknown_copies, (void))
{
    return atomic_load(&n_unknown) - n_own_unknown;
}

EXPORT(int, cuMemcpyHtoD_v2, (address to, const void *from, size_t bytes))
{
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

EXPORT(int, cuMemcpyDtoH_v2, (void *to, address from, size_t bytes))
{
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

EXPORT(int, cuMemcpyHtoDAsync_v2, (address to, const void *from, size_t bytes, void *stream))
{
    return !host_is_here((void *)(uintptr_t)to) ? ELSEWHERE
           : host_captures(stream)              ? 900
                                                : cuMemcpyHtoD_v2(to, from, bytes);
}

EXPORT(int, cuMemcpyDtoHAsync_v2, (void *to, address from, size_t bytes, void *stream))
{
    const bool unknown = !is_known(to);
    n_own_unknown += unknown;
    atomic_fetch_add(&n_unknown, unknown);
    return !host_is_here((void *)(uintptr_t)from) ? ELSEWHERE
           : host_captures(stream)                ? 900
                                                  : cuMemcpyDtoH_v2(to, from, bytes);
}

EXPORT(int, cuDeviceGetByPCIBusId, (int *device, const char *id))
{
    *device = strcmp(id, "0000:01:00.0") == 0;
    return *device == 0 && strcmp(id, "0000:00:00.0") != 0;
}

typedef struct copy_1d {
    address to, from;
    size_t bytes;
} copy_1d;

static void run_copy(void *data)
{
    const copy_1d *c = data;
    memcpy((void *)(uintptr_t)c->to, (const void *)(uintptr_t)c->from, c->bytes);
}

EXPORT(int, cuMemcpyDtoDAsync_v2, (address to, address from, size_t bytes, void *stream))
{
    copy_1d c = { to, from, bytes };
    if (!host_record(stream, run_copy, &c, sizeof c))
        run_copy(&c);
    return stream == NULL || !host_is_here((void *)(uintptr_t)to) ||
           !host_is_here((void *)(uintptr_t)from);
}

/* CUDA_MEMCPY2D, with the members in the order of the driver's documentation. */
typedef struct copy_2d {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    address from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void *to_host;
    address to_device;
    void *to_array;
    size_t to_pitch, width, height;
} copy_2d;

/* Copies within the GPU, or to the computer's memory. */
EXPORT(int, cuMemcpy2DAsync_v2, (const copy_2d *c, void *stream))
{
    if (c->from_type != 2 || c->from_x || c->from_y || c->to_x || c->to_y)
        return 1;
    for (size_t i = 0; i < c->height; i++) {
        const address from = c->from_device + i * c->from_pitch;
        const int result =
            c->to_type == 2
                ? cuMemcpyDtoDAsync_v2(c->to_device + i * c->to_pitch, from, c->width, stream)
                : cuMemcpyDtoHAsync_v2((char *)c->to_host + i * c->to_pitch, from, c->width,
                                       stream);
        if (result)
            return result;
    }
    return 0;
}

EXPORT(int, cuMemsetD8Async, (address to, unsigned char value, size_t bytes, void *stream))
{
    memset((void *)(uintptr_t)to, value, bytes);
    return stream == NULL || !host_is_here((void *)(uintptr_t)to);
}

EXPORT(int, cuEventSynchronize, (void *event))
{
    return event == NULL;
}

EXPORT(int, cuGetErrorName, (int result, const char **text))
{
    *text = result == 900 ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "an error of the mock";
    return 0;
}

EXPORT(int, cuEventElapsedTime,
       (float *milliseconds, const struct timespec *from, const struct timespec *to))
{
    *milliseconds =
        1e3f * (float)(to->tv_sec - from->tv_sec) + 1e-6f * (float)(to->tv_nsec - from->tv_nsec);
    return 0;
}

EXPORT(int, cuGetErrorString, (int result, const char **text))
{
    *text = "an error of the mock";
    return result == 0;
}
