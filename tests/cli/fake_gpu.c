/* fake_gpu.c - an NVIDIA driver and a libkvant_cuda whose GPU is this process: memory is the host's, work is done when it is
 * enqueued, a graph runs nothing again. Attention decodes the pages that it is told of with libkvant's own codecs, so that
 * `kvant bench cuda` is tested without a GPU for what it passes: pages, table, lengths, queries. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../src/device/cuda_table.h"

#define EXPORT __attribute__((visibility("default")))
typedef unsigned long long address;

/* ---- the driver ---- */

EXPORT int cuInit(unsigned flags)
{
    return (int)flags;
}

EXPORT int cuDeviceGetCount(int *n)
{
    return !(*n = 1);
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    return (*device = ordinal);
}

EXPORT int cuDeviceGetName(char *name, int bytes, int device)
{
    return snprintf(name, (size_t)bytes, "fake GPU %d", device) < 0;
}

EXPORT int cuDriverGetVersion(int *version)
{
    return !(*version = 13000);
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = 1 << 20;
    return attribute != 38 || device != 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = NULL;
    return device;
}

EXPORT int cuCtxSetCurrent(void *context)
{
    return context != NULL;
}

/* 32 MiB more than a benchmark leaves free. */
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    *available = *total = (size_t)96 << 20;
    return 0;
}

EXPORT int cuMemAlloc_v2(address *memory, size_t bytes)
{
    void *span = aligned_alloc(256, (bytes + 255) / 256 * 256);
    *memory = (address)(uintptr_t)span;
    return span ? 0 : 2;
}

EXPORT int cuMemFree_v2(address memory)
{
    free((void *)(uintptr_t)memory);
    return 0;
}

EXPORT int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes)
{
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

EXPORT int cuMemcpyDtoH_v2(void *to, address from, size_t bytes)
{
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

EXPORT int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream)
{
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return stream == NULL;
}

EXPORT int cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream)
{
    memset((void *)(uintptr_t)to, value, bytes);
    return stream == NULL;
}

EXPORT int cuStreamBeginCapture_v2(void *stream, int mode)
{
    return stream == NULL || mode != 1;
}

EXPORT int cuStreamEndCapture(void *stream, void **graph)
{
    *graph = malloc(1);
    return stream == NULL;
}

EXPORT int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags)
{
    *executable = malloc(1);
    return graph == NULL || flags != 0;
}

EXPORT int cuGraphLaunch(void *executable, void *stream)
{
    return executable == NULL || stream == NULL;
}

EXPORT int cuGraphExecDestroy(void *executable)
{
    free(executable);
    return 0;
}

EXPORT int cuGraphDestroy(void *graph)
{
    free(graph);
    return 0;
}

EXPORT int cuEventCreate(void **event, unsigned flags)
{
    *event = calloc(1, sizeof(struct timespec));
    return (int)flags;
}

EXPORT int cuEventRecord(void *event, void *stream)
{
    clock_gettime(CLOCK_MONOTONIC, event);
    return stream == NULL;
}

EXPORT int cuEventSynchronize(void *event)
{
    return event == NULL;
}

EXPORT int cuEventElapsedTime(float *milliseconds, const struct timespec *from, const struct timespec *to)
{
    *milliseconds = 1e3f * (float)(to->tv_sec - from->tv_sec) + 1e-6f * (float)(to->tv_nsec - from->tv_nsec);
    return 0;
}

EXPORT int cuGetErrorString(int result, const char **text)
{
    *text = "a fake error";
    return result == 0;
}

/* ---- the library ---- */

struct kvant_cuda_codec {
    kvant_codec *codec; /* equal to the one that it was made from */
    kvant_codec_info info;
};

static kvant_status device_check(char *err, size_t errlen)
{
    snprintf(err, errlen, "all is well");
    return KVANT_OK;
}

static kvant_status codec_create(const kvant_codec_view *view, kvant_cuda_codec **codec, char *err, size_t errlen)
{
    *codec = calloc(1, sizeof **codec);
    (*codec)->info.size = sizeof(kvant_codec_info);
    kvant_status status = kvant_codec_create(view->info->spec, view->info->head_dim, view->info->role, 0, &(*codec)->codec,
                                             err, errlen);
    return status == KVANT_OK ? kvant_codec_get_info((*codec)->codec, &(*codec)->info) : status;
}

static void codec_free(kvant_cuda_codec **codec)
{
    kvant_codec_free(&(*codec)->codec);
    free(*codec);
    *codec = NULL;
}

static kvant_status attention_check(const kvant_cuda_codec *k, const kvant_cuda_codec *v, char *err, size_t errlen)
{
    snprintf(err, errlen, "no kernel for values in 32 bits");
    return k->info.head_dim == v->info.head_dim && v->info.bits < 32 ? KVANT_OK : KVANT_ERR_UNSUPPORTED;
}

static size_t attention_workspace(uint32_t head_dim)
{
    return head_dim;
}

static float from_bf16(const uint16_t *half)
{
    const uint32_t bits = (uint32_t)*half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x8000) >> 16);
}

static const void *page_of(const kvant_cuda_pages *pages, int32_t block, uint32_t head)
{
    return (const char *)pages->base + (size_t)block * pages->block_stride + head * pages->head_stride;
}

/* One head of one sequence. Scores stay small for rows and queries of unit variance: no maximum is taken out. */
static void attend(const kvant_cuda_attention_args *a, uint32_t sequence, uint32_t head)
{
    float rows[2][KVANT_PAGE_TOKENS * KVANT_MAX_HEAD_DIM];
    const uint32_t d = a->k_codec->info.head_dim, kv_head = head / (a->n_heads / a->n_kv_heads);
    const uint16_t *q = (const uint16_t *)a->q + sequence * a->q_batch_stride + head * a->q_head_stride;
    uint16_t *out = (uint16_t *)a->out + sequence * a->out_batch_stride + head * a->out_head_stride;
    double sum = 0, values[KVANT_MAX_HEAD_DIM] = { 0 };
    for (int32_t t = 0; t < a->lengths[sequence]; t++) {
        const float *k = rows[0] + t % KVANT_PAGE_TOKENS * d, *v = rows[1] + t % KVANT_PAGE_TOKENS * d;
        const int32_t block = a->block_table[sequence * a->table_stride + (uint32_t)t / KVANT_PAGE_TOKENS];
        if (t % KVANT_PAGE_TOKENS == 0) {
            kvant_codec_decode(a->k_codec->codec, NULL, page_of(&a->k, block, kv_head), 0, KVANT_PAGE_TOKENS, rows[0], d);
            kvant_codec_decode(a->v_codec->codec, NULL, page_of(&a->v, block, kv_head), 0, KVANT_PAGE_TOKENS, rows[1], d);
        }
        double score = 0;
        for (uint32_t j = 0; j < d; j++)
            score += (double)a->scale * from_bf16(q + j) * k[j];
        sum += exp(score);
        for (uint32_t j = 0; j < d; j++)
            values[j] += exp(score) * v[j];
    }
    for (uint32_t j = 0; j < d; j++)
        out[j] = to_bf16((float)(values[j] / sum));
}

static kvant_status attention(const kvant_cuda_attention_args *a, kvant_cuda_stream stream)
{
    const unsigned char *workspace = a->workspace;
    if (stream == NULL || a->type != KVANT_CUDA_BF16 || a->workspace_bytes != a->k_codec->info.head_dim || workspace[0] != 0)
        return KVANT_ERR_ARGUMENT;
    for (uint32_t i = 0; i < a->batch * a->n_heads; i++)
        attend(a, i / a->n_heads, i % a->n_heads);
    return KVANT_OK;
}

EXPORT kvant_cuda_table_get_fn kvant_cuda_table_get;

const kvant_cuda_table *kvant_cuda_table_get(void)
{
    static const kvant_cuda_table table = { .version = KVANT_CUDA_TABLE_VERSION,
                                            .size = sizeof table,
                                            .view_bytes = sizeof(kvant_codec_view),
                                            .info_bytes = sizeof(kvant_codec_info),
                                            .device_check = device_check,
                                            .codec_create = codec_create,
                                            .codec_free = codec_free,
                                            .attention_check = attention_check,
                                            .attention_workspace = attention_workspace,
                                            .attention = attention };
    return &table;
}
