/* cuda_layers.h - what a cache keeps on a GPU: cuda_layers.c makes it, device_cuda.c works with it. */
#ifndef KVANT_CACHE_CUDA_LAYERS_H
#define KVANT_CACHE_CUDA_LAYERS_H

#include "../base/error.h"
#include "../device/memory.h"
#include "device.h"

#define KVANT_CUDA_MOST_HEADS_PER_KV_HEAD 64u

/* Keys or values of a layer. Arrays are on the device, of all kv heads, or NULL. */
typedef struct cuda_part {
    const kvant_codec *const *codecs; /* the scheme's */
    kvant_cuda_codec *codec;          /* of all kv heads */
    bool owns_codec;                  /* else an earlier layer's */
    size_t page_bytes, offset;        /* of the first page in its block */
    uint64_t *written;                /* per block, a bit per slot */
    float *numbers;                   /* what the following lie in */
    const float *center, *factors, *weights, *inverse_weights;
    const float *attention_factors; /* what queries or outputs are multiplied by */
    size_t n_weights;               /* 0, head_dim, or head_dim^2 */
} cuda_part;

typedef struct cuda_layer {
    cuda_part parts[2]; /* by kvant_role */
    uint8_t *pages;     /* device */
    size_t block_bytes;
} cuda_layer;

/* What a call copies to the device. */
typedef struct cuda_arguments {
    uint32_t refused;
    int32_t from, to, padding;
    int64_t slots[KVANT_CACHE_BATCH];
    int32_t length, padding2[3];
    int32_t table[]; /* n_blocks */
} cuda_arguments;

typedef struct cuda_memory {
    cuda_layer *layers;
    cuda_arguments *arguments; /* device: only addresses of its members are taken */
    cuda_arguments *staging;   /* host */
    uint8_t *workspace;        /* device */
    size_t workspace_bytes;
    float *queries; /* device: transformed ones */
    size_t queries_bytes;
} cuda_memory;

/* The cache's device functions of the same names. */
kvant_status kvant_cuda_layers_create(kvant_cache *cache);
void kvant_cuda_layers_destroy(kvant_cache *cache);

/* Leaves a message for a call of the GPU that failed. */
static inline kvant_status kvant_cuda_said(kvant_status status, const char *what)
{
    return status == KVANT_OK
               ? status
               : kvant_fail(NULL, status, "cache on cuda: %s: %s", what, kvant_strerror(status));
}

#endif
