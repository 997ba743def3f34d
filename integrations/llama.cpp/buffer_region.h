/* buffer_region.h - the memory of one buffer and the cache tensors in it.
 *
 * buffer_region.c owns the list of all live regions, which threads may read at any time, and adds
 * up their memory (kvp_buffer_kv_memory and kvp_buffer_kv_size of buffer.h). It does not know
 * ggml's tables of functions, nor how large a tensor is: buffer.c does.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "kv_steps.h"
#include "kv_tensor.h"

typedef struct kvp_region {
    char *base;
    size_t size;
    /* the buffer whose memory it is, and the functions for cells in there; NULL: mapped here */
    abi_buffer *inner;
    const kvp_remote *remote;
    bool latents; /* its cache tensors are latents (mla.h) */
    kvp_kv **tensors;
    size_t n_tensors;
    /* Places the cells of one stream. All cache tensors of a buffer belong to one cache, so they
     * share it. */
    kvp_placement *placement;
    uint32_t n_placed;         /* cells that `placement` places */
    struct kvp_cpu_rows *rows; /* the cache's rows in place (cpu_rows.h); NULL: never yet */
    kvp_steps steps[2];        /* shared pages of the keys, and of the values */
    struct kvp_region *next;   /* the next live region */
} kvp_region;

/* Makes a live region in the memory of `inner`, or in memory that it maps when inner is NULL.
 * Returns NULL when there is no memory; inner is then still the caller's. */
kvp_region *kvp_region_create(size_t size, abi_buffer *inner);

/* Frees the region, its tensors and its memory, `inner` included. */
void kvp_region_free(kvp_region *region);

/* Gives the region a tensor, which it frees with itself. Returns false when there is no memory. */
bool kvp_region_add(kvp_region *region, kvp_kv *kv);

/* Whether the bytes lie in the region and in no other tensor's. */
bool kvp_region_is_free(const kvp_region *region, const char *at, size_t bytes);
