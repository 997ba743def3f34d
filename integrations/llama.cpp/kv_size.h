/* kv_size.h - the size of a compressed cache when all of its cells are written, by its parts.
 *
 * The line at the start, `kvant inspect` and `kvant eval` all print these sums, so that a size has
 * one meaning everywhere. The struct is also the plug-in's interface to `kvant` (kvant_kv_size). It
 * is not the memory that a cache takes now, which kvp_buffer_kv_memory (buffer.h) measures. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* Bytes, unless the comment says otherwise. */
typedef struct kvp_kv_size {
    size_t size;       /* set by the caller to sizeof(kvp_kv_size) */
    double cells;      /* tokens that the longest cache of the context holds, all streams */
    double numbers[2]; /* numbers of all keys, and of all values */
    double codec_bits; /* bits of these numbers as their codecs store them */
    double bytes;      /* of the cache; the next two are part of it */
    double exact;      /* fp16 pages: first and newest tokens, and rows of a step */
    double transforms; /* matrices, centres and scales: learned at full length, or calibrated */
    double working;    /* next to `bytes`, while kvant learns */
    double room;       /* part of working that the layers need one after another */
    double staging;    /* part of exact that all tensors on a GPU share */
    double matrices;   /* part of transforms that all tensors on a GPU share */
} kvp_kv_size;

/* The plug-in's kvant_kv_size: the sum over all caches that are alive. on_gpu: as they would be in
 * GPU memory. False when a cache is not bound yet, or lies on a GPU and is wanted elsewhere. */
typedef bool kvp_kv_size_fn(bool on_gpu, kvp_kv_size *size);

/* Bits per number: everything in `bytes`, spread over all numbers. */
static inline double kvp_kv_size_bits(const kvp_kv_size *size)
{
    return 8 * size->bytes / (size->numbers[0] + size->numbers[1]);
}
