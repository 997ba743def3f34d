/* transform_bytes.h - the bytes of a transform, and the hash of a tensor's codecs, as records
 * hold them (format.md, "Records"). It owns neither pages nor slots. */
#pragma once

#include <kvant/tensor_hooks.h>

#include "tensor.h"

/* Kinds of the bytes of a transform. Up to KVANT_BYTES_CENTERS, each kind holds the numbers of the
 * kind before it, too. */
enum {
    KVANT_BYTES_NOTHING,
    KVANT_BYTES_AFFINE,   /* centre and scale of all kv heads */
    KVANT_BYTES_MATRICES, /* W */
    KVANT_BYTES_CENTERS,  /* centres of blocks */
    KVANT_BYTES_HALVES,   /* centre and scale of all kv heads as binary16 */
    KVANT_BYTES_KINDS
};

static inline bool kvant_bytes_have_matrices(uint32_t kind)
{
    return kind == KVANT_BYTES_MATRICES || kind == KVANT_BYTES_CENTERS;
}

uint32_t kvant_transform_kind(const kvant_tensor *tensor, uint32_t transform_id);

/* A multiple of 8. */
size_t kvant_transform_bytes(const kvant_tensor *tensor, uint32_t kind);

void kvant_transform_export(const kvant_tensor *tensor, uint32_t transform_id, uint8_t *to);

/* The RoPE by which centres of blocks rotate. frequencies: gets head_dim / 2 numbers. */
kvant_rope kvant_centers_rope(const struct kvant_centers *centers, float *frequencies);

/* A RoPE in a record. kvant_rope_export leaves frequencies that RoPE does not use as they are.
 * kvant_rope_import checks all numbers; frequencies: gets head_dim / 2. KVANT_ERR_FORMAT. */
size_t kvant_rope_bytes(const kvant_tensor *tensor);
void kvant_rope_export(const kvant_rope *rope, uint8_t *to);
kvant_status kvant_rope_import(const kvant_tensor *tensor, const uint8_t *data, kvant_rope *rope,
                               float *frequencies);

/* Writes the numbers of a transform that no tensor has: its triangles are the parts' one after
 * another. Its scales are ones. */
void kvant_transform_bytes_of(const kvant_tensor *tensor, const kvant_matrix_numbers *numbers,
                              uint8_t *to);

/* Finds or makes the transform that the bytes describe. The bytes may have any alignment and
 * content. KVANT_ERR_FORMAT, KVANT_ERR_FULL (no transform id is free), KVANT_ERR_MEMORY. */
kvant_status kvant_transform_import(kvant_tensor *tensor, const uint8_t *data, uint32_t kind,
                                    uint32_t n_threads, uint32_t *transform_id);

/* Whether the tensor can have transforms of this kind. KVANT_ERR_UNSUPPORTED. */
kvant_status kvant_transform_accepts(const kvant_tensor *tensor, uint32_t kind);

/* A hash of the fingerprints of all codecs. Fingerprints cover everything that bytes depend on: the
 * spec with its seed, and the numbers from a calibration. */
uint64_t kvant_tensor_scheme(const kvant_tensor *tensor);

/* KVANT_ERR_FORMAT with a message that says what is damaged. */
kvant_status kvant_damaged(const char *what);

/* KVANT_ERR_FULL with a message. */
kvant_status kvant_no_transform(void);
