/* tensor_hooks.h - unstable: functions of a tensor for kvant's llama.cpp plug-in and kvant's tests.
 *
 * The plug-in keeps pages on a GPU by itself. A tensor in the computer's memory learns for it, and
 * these functions give the plug-in the transforms and centres. They may change or go with every
 * release, also between patch versions. A program that uses them has to be compiled with the
 * headers of the libkvant that it loads. Threads as in tensor.h.
 */
#ifndef KVANT_TENSOR_HOOKS_H
#define KVANT_TENSOR_HOOKS_H

#include <kvant/tensor.h>

KVANT_BEGIN_C

/* phase = the rotation at a position: the cosines of a head's pairs of channels, then the sines,
 * head_dim numbers. pairs: NULL, or head_dim numbers, two channels per pair. KVANT_ERR_ARGUMENT
 * (also for an odd head_dim), KVANT_ERR_NONFINITE. */
KVANT_API kvant_status kvant_rope_phase(const kvant_rope *rope, uint32_t head_dim, int32_t position,
                                        float *phase, uint16_t *pairs);

/* Like kvant_tensor_make_codec, for keys at positions `first` to `last`, with one codec per kv head
 * and with matrices from the rows and queries so far. The positions may exceed the rope's
 * n_positions. The matrices are for all position buckets from the bucket of `first` to the bucket
 * of `last`. The first bucket is [0, 1024), the second bucket begins at 1024, and each is twice as
 * long as the bucket before it. Each bucket counts as much as each other bucket.
 *
 * center_span: 0, or a number of positions. Then every `center_span` positions have their own
 * centre (kvant_tensor_bucket_center) instead of the codecs', because RoPE rotates the mean of
 * keys, too; the matrices are for keys minus these centres.
 *
 * likes and codecs have n_kv_heads elements. The caller frees the codecs; on an error all are NULL.
 * The call counts as a write (see Threads in tensor.h), but changes no stored row. It takes a
 * millisecond or two per kv head. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY; KVANT_ERR_UNSUPPORTED
 * without transform=first or a rope, or while there are too few rows and queries. */
KVANT_API kvant_status kvant_tensor_make_bucket_codecs(kvant_tensor *tensor, int32_t first,
                                                       int32_t last, uint32_t center_span,
                                                       const kvant_codec *const *likes,
                                                       kvant_codec **codecs, uint32_t n_threads);

/* Returns the mean of keys at positions `first` to `last`, from the rows so far. center: n_kv_heads
 * x head_dim. Errors as above. */
KVANT_API kvant_status kvant_tensor_bucket_center(const kvant_tensor *tensor, int32_t first,
                                                  int32_t last, float *center);

/* Learns from n rows as kvant_tensor_write does, and stores none of them. A GPU keeps the rows of a
 * cache itself; encoding them here would take a third of the time of learning. n is at least 64.
 * The blocks of the slots get the transform that the rows select, for kvant_tensor_get_block and
 * kvant_tensor_make_codec. No other function may be called for these blocks. Rows are not checked
 * for fp16's range. KVANT_ERR_ARGUMENT, KVANT_ERR_NONFINITE, KVANT_ERR_MEMORY: nothing was
 * learned. */
KVANT_API kvant_status kvant_tensor_learn(kvant_tensor *tensor, const int64_t *slots, size_t n,
                                          const float *rows, size_t stride, uint32_t n_threads);

/* Some slots of a block, a bit each. */
typedef struct kvant_block_slots {
    uint64_t slots;
    uint32_t block;
} kvant_block_slots;

/* A record holds the rows of some slots of n different blocks, as codes or fp16 rows, and each of
 * their transforms once (format.md, "Records"). kvant_tensor_export makes a record of one block.
 * Exporting leaves no bit of other slots. `bytes` is what kvant_tensor_record_size returns. At most
 * n_threads threads are used (at least 1).
 * KVANT_ERR_ARGUMENT (also for a block that occurs twice), KVANT_ERR_MEMORY, KVANT_ERR_CUDA. */
KVANT_API kvant_status kvant_tensor_record_size(const kvant_tensor *tensor,
                                                const kvant_block_slots *blocks, uint32_t n,
                                                size_t *bytes);
KVANT_API kvant_status kvant_tensor_export_record(const kvant_tensor *tensor,
                                                  const kvant_block_slots *blocks, uint32_t n,
                                                  void *data, size_t bytes, uint32_t n_threads);

/* Replaces n blocks by those of a record, whose i-th block has exactly the slots of blocks[i]. Rows
 * keep their codes, and are read and attended to as in the tensor that exported them. Any bytes are
 * safe to pass. KVANT_ERR_FORMAT (damaged, or of another scheme), KVANT_ERR_UNSUPPORTED,
 * KVANT_ERR_FULL (no room for transforms, shifts or fp16 pages), KVANT_ERR_ARGUMENT: the tensor is
 * then unchanged. KVANT_ERR_MEMORY, KVANT_ERR_CUDA: blocks may be empty. */
KVANT_API kvant_status kvant_tensor_import_record(kvant_tensor *tensor,
                                                  const kvant_block_slots *blocks, uint32_t n,
                                                  const void *data, size_t bytes,
                                                  uint32_t n_threads);

/* The same for a record whose checksum the caller has compared with its bytes. */
KVANT_API kvant_status kvant_tensor_import_checked_record(kvant_tensor *tensor,
                                                          const kvant_block_slots *blocks,
                                                          uint32_t n, const void *data,
                                                          size_t bytes, uint32_t n_threads);

KVANT_END_C

#endif /* KVANT_TENSOR_HOOKS_H */
