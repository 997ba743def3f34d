/* tensor_hooks.h - unstable: functions of a tensor for kvant's llama.cpp plug-in and kvant's tests.
 *
 * The plug-in keeps pages on a GPU by itself. These functions make records of such pages and read
 * them. They may change or go with every release, also between patch versions. A program that uses
 * them has to be compiled with the headers of the libkvant that it loads. Threads as in tensor.h.
 */
#ifndef KVANT_TENSOR_HOOKS_H
#define KVANT_TENSOR_HOOKS_H

#include <kvant/attention.h>
#include <kvant/tensor.h>

KVANT_BEGIN_C

/* phase = the rotation at a position: the cosines of a head's pairs of channels, then the sines,
 * head_dim numbers. pairs: NULL, or head_dim numbers, two channels per pair. KVANT_ERR_ARGUMENT
 * (also for an odd head_dim), KVANT_ERR_NONFINITE. */
KVANT_API kvant_status kvant_rope_phase(const kvant_rope *rope, uint32_t head_dim, int32_t position,
                                        float *phase, uint16_t *pairs);

/* Makes a codec like another one, with zeros as its centre and with W = 1. Kernels that get centres
 * and matrices as arguments need no more of a codec. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_codec_unit_matrix(const kvant_codec *like, kvant_codec **codec);

/* learned_bytes plus working_bytes of kvant_tensor_get_info, without a look at every block. 0 for
 * NULL. */
KVANT_API size_t kvant_tensor_learning_bytes(const kvant_tensor *tensor);

/* A step of a layer: attention, and before it one new row of keys and of values. */
typedef struct kvant_attention_step {
    int64_t slot;               /* of the new row */
    const float *k_row, *v_row; /* of all kv heads; NULL: there is no new row */
    /* The token's position, if later rows are to learn from its queries. Becomes NULL when the call
     * notes them. */
    const int32_t *position;
    /* Returns a workspace of at least `bytes` bytes, aligned to 64, or NULL. Called only once. */
    void *(*workspace)(void *user, size_t bytes);
    void *user;
    bool stored; /* a result: the new row was stored */
} kvant_attention_step;

/* Does what kvant_tensor_write_layer, kvant_attention and kvant_tensor_note_queries do one after
 * another, with the same bytes and numbers, but in one loop. The errors are theirs, and
 * KVANT_ERR_MEMORY without a workspace. After an error with `stored` false the row was refused, and
 * both tensors are as before. With `stored` true the row is there, and attention failed. */
KVANT_API kvant_status kvant_attention_step_run(kvant_tensor *k, kvant_tensor *v,
                                                const kvant_attention_problem *problem,
                                                kvant_attention_step *step);

/* Asks for the memory in which a step of one row finds the tensor's state. `ahead` counts the steps
 * of other tensors until then: call it with 3, with 2, and with 1, because each call reads what the
 * call before it asked for. It changes nothing, and any slot will do. */
KVANT_API void kvant_tensor_prefetch(const kvant_tensor *tensor, int64_t slot, uint32_t ahead);

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

/* Replaces n blocks by the blocks of a record. The record's i-th block has exactly the slots of
 * blocks[i]. Rows keep their codes, and are read and attended to as in the tensor that exported
 * them. Any bytes are safe to pass. KVANT_ERR_FORMAT (damaged, or of another scheme),
 * KVANT_ERR_UNSUPPORTED, KVANT_ERR_FULL (no room for transforms, shifts or fp16 pages),
 * KVANT_ERR_ARGUMENT: the tensor is then unchanged. KVANT_ERR_MEMORY, KVANT_ERR_CUDA: blocks may
 * be empty. */
KVANT_API kvant_status kvant_tensor_import_record(kvant_tensor *tensor,
                                                  const kvant_block_slots *blocks, uint32_t n,
                                                  const void *data, size_t bytes,
                                                  uint32_t n_threads);

/* The same for a record whose checksum the caller has compared with its bytes. */
KVANT_API kvant_status kvant_tensor_import_checked_record(kvant_tensor *tensor,
                                                          const kvant_block_slots *blocks,
                                                          uint32_t n, const void *data,
                                                          size_t bytes, uint32_t n_threads);

/* Records of blocks whose pages lie elsewhere, such as on a GPU. The tensor of these calls has the
 * codecs and kv heads of the pages, and its own blocks do not count.
 *
 * A transform is given as records hold it (format.md): a head of KVANT_TRANSFORM_HEAD bytes with
 * its kind, the centre and the scale of all kv heads as floats, and the rest. It takes
 * kvant_tensor_transform_bytes, and at most kvant_tensor_transform_size.
 * `kvant_tensor_get_transform` returns the transform of a block of the tensor itself.
 * `kvant_tensor_set_transform` gives a transform to a block without rows, for functions that read
 * it: kvant_tensor_get_block and the two functions below. KVANT_ERR_FORMAT, KVANT_ERR_FULL,
 * KVANT_ERR_MEMORY. `kvant_tensor_affine_transform` writes a centre and a scale (NULL: none), and
 * returns how many bytes it wrote; `kvant_tensor_half_transform` rounds them to binary16, in half
 * of the bytes. `kvant_tensor_matrix_transform` writes one with matrices.
 *
 * `kvant_tensor_mean_codecs` makes a codec for each kv head as kvant_tensor_make_codec does, but
 * with the centre of blocks whose position is not known. `like` and `codecs` have one entry per kv
 * head. After an error some of `codecs` may not be NULL; the caller frees them.
 * `kvant_tensor_center_rope` says by which RoPE the centre of a block rotates; frequencies has room
 * for head_dim / 2 numbers. KVANT_ERR_UNSUPPORTED: it does not. */
#define KVANT_TRANSFORM_HEAD 8u
KVANT_API size_t kvant_tensor_transform_size(const kvant_tensor *tensor);
KVANT_API size_t kvant_tensor_transform_bytes(const kvant_tensor *tensor, const void *transform);
KVANT_API kvant_status kvant_tensor_get_transform(const kvant_tensor *tensor, uint32_t block,
                                                  void *bytes, size_t *used);
KVANT_API kvant_status kvant_tensor_set_transform(kvant_tensor *tensor, uint32_t block,
                                                  const void *transform, uint32_t n_threads);
KVANT_API size_t kvant_tensor_affine_transform(const kvant_tensor *tensor, const float *center,
                                               const float *scale, void *bytes);
KVANT_API size_t kvant_tensor_half_transform(const kvant_tensor *tensor, const float *center,
                                             const float *scale, void *bytes);
typedef struct kvant_matrix_numbers {
    const float *center;       /* of all kv heads; NULL: zeros */
    const uint16_t *triangles; /* W of each part of each kv head (format.md) */
    const float *start;        /* the centre of a block at position 0; NULL: no centres of blocks */
    const kvant_rope *rope;    /* by which that centre rotates */
} kvant_matrix_numbers;
KVANT_API size_t kvant_tensor_matrix_transform(const kvant_tensor *tensor,
                                               const kvant_matrix_numbers *numbers, void *bytes);
KVANT_API kvant_status kvant_tensor_mean_codecs(const kvant_tensor *tensor, uint32_t block,
                                                const kvant_codec *const *like, uint32_t n_threads,
                                                kvant_codec **codecs);
KVANT_API kvant_status kvant_tensor_center_rope(const kvant_tensor *tensor, uint32_t block,
                                                uint32_t *n_dims, uint32_t *interleaved,
                                                float *frequencies);

/* A block. A record holds `slots`. `written` are all slots with rows in its pages. With `exact`, it
 * has fp16 pages, and slots in `dirty` have no codes. All keys moved by `shift` positions since
 * they were encoded. `position` is the position that its first slot had before that; INT32_MIN: it
 * is not known. `age`: rows of the sequence that were written later. `transform`: a place in the
 * record's list, in the order of first use. has_matrix and has_centers are results: the transform
 * has matrices, and centres that rotate. */
typedef struct kvant_outer_block {
    uint64_t slots, written, dirty;
    uint32_t transform, age;
    int32_t position, shift;
    int exact, has_matrix, has_centers;
    void *rows, *codes; /* its fp16 pages and its sealed pages, of all kv heads; NULL: none */
} kvant_outer_block;

typedef struct kvant_outer_record {
    kvant_outer_block *blocks;
    uint32_t n_blocks, n_transforms;
    const void *const *transforms;
    const kvant_rope *rope; /* by which keys moved; NULL: no key moved */
} kvant_outer_record;

/* `kvant_tensor_outer_size` returns the size of the record. `kvant_tensor_outer_begin` writes all
 * of it except pages, and sets `rows` and `codes` of the blocks to the places of their pages, to
 * which the caller copies. `kvant_tensor_outer_end` then removes the bits of other slots, and
 * writes the checksum. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY; KVANT_ERR_UNSUPPORTED: codes share
 * their scales with rows of other slots. */
KVANT_API kvant_status kvant_tensor_outer_size(const kvant_tensor *tensor,
                                               const kvant_outer_record *record, size_t *bytes);
KVANT_API kvant_status kvant_tensor_outer_begin(const kvant_tensor *tensor,
                                                const kvant_outer_record *record, void *data,
                                                size_t bytes);
KVANT_API kvant_status kvant_tensor_outer_end(const kvant_tensor *tensor,
                                              const kvant_outer_record *record, void *data,
                                              size_t bytes);

/* Reads a record: describes its n blocks, which have exactly these slots, and lists its transforms.
 * Pages and transforms lie in `data`. `shift` is KVANT_ANY_SHIFT if the keys of a block moved by
 * different distances. With is_checked, the caller has compared the checksum with the bytes. Any
 * bytes are safe to pass. KVANT_ERR_FORMAT, KVANT_ERR_UNSUPPORTED, KVANT_ERR_FULL (too many
 * shifts), KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_tensor_read_outer(kvant_tensor *tensor, const kvant_block_slots *slots,
                                               uint32_t n, const void *data, size_t bytes,
                                               int is_checked, kvant_outer_block *blocks,
                                               const void *transforms[KVANT_MAX_TRANSFORMS]);

KVANT_END_C

#endif /* KVANT_TENSOR_HOOKS_H */
