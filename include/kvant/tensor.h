/* tensor.h - the keys or the values of one layer as compressed pages, addressed by slot: for
 * engines that manage blocks themselves.
 *
 * A block holds 64 token positions: one page per kv head. A slot is the place of one token, 64 x
 * block + offset. The engine decides which token goes to which slot, and writes slots in any order
 * and as often as it likes. Engines that want the library to manage blocks use cache.h, which is
 * made of tensors.
 *
 * A block has one of four states (architecture.md has the diagram):
 *
 *   empty    No slot was written.
 *
 *   open     The page holds transformed fp16 rows. There are four reasons: the block belongs to the
 *            exact part; the codec asks for it (block_tokens, recent_tokens); there is no transform
 *            yet; a sealed block is being rewritten.
 *
 *   sink     The page stays fp16, because the block holds one of the first tokens of its sequence.
 *
 *   sealed   The page holds codes.
 *
 * With an exact part (kvant_exact_part) every row is fp16 first. A write begins by sealing the rows
 * that have left the window of the newest rows, so that attention to the rows of the write reads
 * them as fp16. All sequences share one pool of open blocks. When it is full, sequences that are
 * not written give pages back: the pages of their newest tokens first, of their first tokens last.
 * Tensors that are written one after another may share the memory for the rows of a write
 * (kvant_step_pages).
 *
 * Transforms (`transform_id` in names). With center=first or norm=first in a codec's spec, centre
 * and scale per channel come from the rows themselves. The tensor keeps several such transforms.
 * Rows stay in open blocks until there are 64 of them; then the first transform is made. If every
 * existing transform would give a batch a much larger error than a new one, the batch gets a new
 * transform. Each block remembers its transform, and a transform never changes, so attention
 * handles blocks of different transforms exactly. The statistics are robust: some rows far from all
 * other rows do not change them. learning.md has the rules.
 *
 * Kv heads may have codecs of different specs and sizes. They must agree in role, head_dim,
 * sink_tokens, recent_tokens and block_tokens, because a block is open or sealed for all its kv
 * heads at once.
 *
 * Memory: the caller allocates one span, so that an engine's own allocator counts it. Pages of
 * blocks that were never written are never accessed, so lazily zeroed memory stays unused until
 * then.
 *
 * Threads: any number of readers at once, or one writer and no reader. Stack: 64 KiB are enough for
 * every call.
 */
#ifndef KVANT_TENSOR_H
#define KVANT_TENSOR_H

#include <kvant/codec.h>

KVANT_BEGIN_C

/* The most transforms of a tensor. Queries are transformed for each transform that their keys have,
 * so a larger limit slows attention over long contexts. With a smaller one, more positions share a
 * transform. */
#define KVANT_MAX_TRANSFORMS 12u

typedef struct kvant_tensor kvant_tensor;

/* The tokens that a cache keeps as fp16, whatever its codecs are (kvant_scheme_exact). A block is
 * open or sealed as a whole, so up to one block more of each sequence may be exact. */
typedef struct kvant_exact_part {
    size_t size;     /* set by the caller to sizeof(kvant_exact_part) */
    uint32_t first;  /* of each sequence, a multiple of 64; 0: none, even if a codec has sinks */
    uint32_t newest; /* of each sequence: the tokens written last */
    /* The exact tokens of all sequences together, at least first + newest. There is memory for this
     * many tokens and for one block more. If sequences need more, the sequences that were not
     * written for the longest time are sealed first. */
    uint32_t total;
    /* How many rows of one write stay exact until the next write, so that queries of the same batch
     * see them as fp16. There is memory for these rows, too, unless the tensor has
     * kvant_step_pages. The first rows of a longer write are sealed at once. */
    uint32_t step;
} kvant_exact_part;

/* Memory for the rows of a step that several tensors share, for example the keys of all layers. The
 * engine writes the tensors one after another, and attends to each before it writes the next one.
 * The memory belongs to the tensor that used it last. When another tensor needs it, the rows of the
 * former owner are sealed, or move to the owner's memory if they are among its newest rows. So a
 * tensor needs no memory for steps, and its rows can be read at any time. They are exact until
 * another of the tensors is written. */
typedef struct kvant_step_pages {
    size_t size;         /* set by the caller to sizeof(kvant_step_pages) */
    void *memory;        /* aligned to KVANT_PAGE_ALIGN */
    size_t bytes;        /* a tensor can use as many blocks of fp16 rows as fit */
    kvant_tensor *owner; /* set by kvant; NULL at first */
} kvant_step_pages;

typedef struct kvant_tensor_params {
    size_t size; /* set by the caller to sizeof(kvant_tensor_params) */
    /* One codec per kv head. The array is copied, the codecs are borrowed. */
    const kvant_codec *const *codecs;
    uint32_t n_kv_heads;
    uint32_t n_sequences; /* each sequence keeps its sinks and its newest rows as fp16 */
    uint32_t n_blocks;    /* of all sequences */
    /* n: blocks per sequence, for engines with a fixed share each. Block b is then block b % n of
     * sequence b / n. 0: all blocks belong to sequence 0, in their order, until kvant_tensor_assign
     * says otherwise. */
    uint32_t blocks_per_sequence;
    uint32_t n_open_blocks; /* open blocks without sinks; 0: as many as the codecs need */
    /* Bytes from one block's pages to the next block's pages, if memory holds other things between
     * them: a multiple of KVANT_PAGE_ALIGN. 0: blocks follow each other. Codecs that also keep fp16
     * rows must have 0. */
    size_t block_stride;
    /* The rows that the cache keeps as fp16. The larger of its counts and the codecs' counts
     * applies. NULL: only the codecs' counts apply. Tensors whose codecs store fp16 rows ignore
     * it. */
    const kvant_exact_part *exact;
    /* The memory for the rows of a step, instead of exact->step rows in the tensor's own memory. It
     * must outlive the tensor. At most one of the tensors that share it may be written at a time.
     * NULL: the tensor shares nothing. It is for tensors in the computer's memory, and is used only
     * with an exact part. With several sequences the tensor has room for up to `step` more exact
     * rows of them. */
    kvant_step_pages *steps;
} kvant_tensor_params;

/* *bytes = the memory that kvant_tensor_create needs. KVANT_ERR_ARGUMENT with the reason in
 * kvant_error_message(), KVANT_ERR_MEMORY when the size overflows. */
KVANT_API kvant_status kvant_tensor_size(const kvant_tensor_params *params, size_t *bytes);

/* Creates a tensor in memory of kvant_tensor_size bytes, which is zeroed and aligned to
 * KVANT_PAGE_ALIGN. The memory stays the caller's and must outlive the tensor.
 * KVANT_ERR_UNSUPPORTED when a codec needs a calibration and was created without one. */
KVANT_API kvant_status kvant_tensor_create(const kvant_tensor_params *params, void *memory,
                                           kvant_tensor **tensor);

/* Frees the tensor, not its memory, and sets *tensor to NULL; NULL and a pointer to NULL are
 * fine. */
KVANT_API void kvant_tensor_free(kvant_tensor **tensor);

/* Makes a block the index-th block of a sequence. This decides whether it is a sink, and whose
 * newest rows it holds. The block must be empty and blocks_per_sequence must be 0; otherwise
 * KVANT_ERR_ARGUMENT. */
KVANT_API kvant_status kvant_tensor_assign(kvant_tensor *tensor, uint32_t block, uint32_t sequence,
                                           uint32_t index);

/* Writes n rows. Row i (n_kv_heads x head_dim floats at rows + i * stride) goes to slots[i]. If a
 * slot occurs several times, its last row stays. All rows are checked first: on an error nothing of
 * the call is stored, marked or learned. KVANT_ERR_NONFINITE, KVANT_ERR_RANGE, KVANT_ERR_ARGUMENT,
 * KVANT_ERR_MEMORY (learning, and slots whose keys were shifted, take memory). At most n_threads
 * threads are used (at least 1); the bytes do not depend on their number. */
KVANT_API kvant_status kvant_tensor_write(kvant_tensor *tensor, const int64_t *slots, size_t n,
                                          const float *rows, size_t stride, uint32_t n_threads);

/* The same for the keys and the values of a layer, at the same slots. On an error neither tensor
 * changes. One loop encodes the kv heads of both, which for a single token uses threads better than
 * two loops. */
KVANT_API kvant_status kvant_tensor_write_layer(kvant_tensor *k, kvant_tensor *v,
                                                const int64_t *slots, size_t n, const float *k_rows,
                                                size_t k_stride, const float *v_rows,
                                                size_t v_stride, uint32_t n_threads);

/* Queries of tokens, for transform=first. Query head h of token t is head_dim floats at q + t *
 * token_stride + h * head_stride. Heads that share a kv head follow each other. */
typedef struct kvant_queries {
    size_t size; /* set by the caller to sizeof(kvant_queries) */
    const float *q;
    size_t token_stride, head_stride;
    uint32_t n_tokens, n_heads;
    /* Per token, for kvant_rope. NULL: the tokens follow the row that was written last. */
    const int32_t *positions;
} kvant_queries;

/* kvant_tensor_note_queries passes queries, from which the next write to the keys learns. It counts
 * as a write (see Threads). Best are the queries of the tokens whose keys are written next. Without
 * queries there is no matrix. Queries that are not finite are left out.
 *
 * kvant_tensor_wants_queries says whether a call with n_tokens tokens would be used. It never is if
 * no codec has transform=first. After enough was learned, only calls with 64 tokens or more are
 * used. Once there are 8 queries per channel, only one in 8 single tokens is used. */
KVANT_API kvant_status kvant_tensor_note_queries(kvant_tensor *tensor, const kvant_queries *queries,
                                                 uint32_t n_threads);
KVANT_API int kvant_tensor_wants_queries(const kvant_tensor *tensor, size_t n_tokens);

/* RoPE: how keys and queries rotate with their positions. Slow pairs of channels rotate on long
 * after enough rows were seen. If the tensor knows the RoPE, it makes transforms for positions that
 * no row has had yet. */
typedef struct kvant_rope {
    size_t size;     /* set by the caller to sizeof(kvant_rope) */
    uint32_t n_dims; /* the first n_dims channels of a head rotate; even */
    /* Not 0: pairs are channels (2i, 2i + 1). 0: pairs are channels (i, i + n_dims / 2). */
    uint32_t interleaved;
    /* n_dims / 2, radians per position, between -1024 and 1024; copied */
    const float *frequencies;
    uint32_t n_positions; /* the most positions of a sequence; 0: as many as there are slots */
    /* How many transforms share the positions. 0: as many as are worth their memory. 1: one. */
    uint32_t n_position_transforms;
    /* Not 0: each block has its own centre, the mean of keys at the block's positions. */
    uint32_t block_centers;
} kvant_rope;

/* Sets the RoPE of keys with transform=first; for other tensors nothing happens. Transforms in
 * force stay. If the RoPE differs from the former one (NULL: none), the statistics for later
 * transforms are forgotten. Counts as a write (see Threads). KVANT_ERR_ARGUMENT,
 * KVANT_ERR_NONFINITE for frequencies, KVANT_ERR_MEMORY, KVANT_ERR_UNSUPPORTED for block_centers in
 * a kvant_cache on a GPU. */
KVANT_API kvant_status kvant_tensor_set_rope(kvant_tensor *tensor, const kvant_rope *rope);

/* Sets the positions of the n rows of the next write, which borrows the array. Without this call a
 * row's position is its place in its sequence: 64 x index of the block + offset. Below 0: the
 * position is not known, and the tensor does not learn from the row. */
KVANT_API kvant_status kvant_tensor_next_positions(kvant_tensor *tensor, const int32_t *positions,
                                                   size_t n);

/* Moves keys to other positions without encoding them again. The key in slot i, for i < n, moves by
 * by[i] positions, as if RoPE had rotated it further. A by[i] of KVANT_ANY_SHIFT says that nobody
 * reads the slot before it is written again. Reading, attention, copies and exports return the
 * shifted keys. Rows that are written later are at their own positions.
 *
 * rope is the RoPE of the keys. Only its first four members count, and they must stay the same
 * while a slot is shifted. A tensor has at most 32 different sums of shifts at a time. If a call
 * needs more, all shifted keys are encoded once more. The call takes about 12 ns per slot and
 * counts as a write (see Threads).
 *
 * On an error no key has moved: KVANT_ERR_ARGUMENT (values, a shift beyond 2^30),
 * KVANT_ERR_UNSUPPORTED (a kvant_cache on a GPU, a channel that has no partner to rotate with),
 * KVANT_ERR_FULL (more than 32 sums in one call), KVANT_ERR_MEMORY, KVANT_ERR_RANGE. */
#define KVANT_ANY_SHIFT INT32_MIN
KVANT_API kvant_status kvant_tensor_shift(kvant_tensor *tensor, const kvant_rope *rope,
                                          const int32_t *by, size_t n, uint32_t n_threads);

/* Reads n slots in any order into n rows, with at most n_threads threads (at least 1). A slot that
 * was never written reads as zeros, or as the centre if there is one. A negative slot reads as
 * zeros. */
KVANT_API kvant_status kvant_tensor_read_slots(const kvant_tensor *tensor, const int64_t *slots,
                                               size_t n, float *rows, size_t stride,
                                               uint32_t n_threads);

/* Reads the n slots from `first` on in one thread. */
KVANT_API kvant_status kvant_tensor_read(const kvant_tensor *tensor, size_t first, size_t n,
                                         float *rows, size_t stride);

/* Makes the n blocks from `first` on empty. kvant_tensor_clear empties all blocks and also forgets
 * the transforms. Only memory that was written is accessed. */
KVANT_API kvant_status kvant_tensor_clear_blocks(kvant_tensor *tensor, uint32_t first, uint32_t n);
KVANT_API void kvant_tensor_clear(kvant_tensor *tensor);

/* Copies n blocks without changing their bytes, between tensors of the same codecs, or within one
 * tensor (overlapping spans: KVANT_ERR_ARGUMENT). The targets become equal to the sources, also to
 * empty ones. KVANT_ERR_FULL when the target has no room for the transforms or the open pages of
 * the blocks; copy by reading and writing then. On an error the target's blocks are unchanged. */
KVANT_API kvant_status kvant_tensor_copy(const kvant_tensor *from, uint32_t first, kvant_tensor *to,
                                         uint32_t to_first, uint32_t n);

/* The most bytes that kvant_tensor_export writes. An exported block can be imported by another
 * process, machine or device. It holds pages, which slots are written, a hash of the codecs, the
 * block's transform, and a checksum (format.md, "Records"). */
KVANT_API size_t kvant_tensor_export_size(const kvant_tensor *tensor);

/* Exports a block and sets *used to the bytes written. Slots that are not written leave no bit.
 * KVANT_ERR_ARGUMENT when `bytes` is too small, KVANT_ERR_MEMORY; the content of data is then not
 * specified. */
KVANT_API kvant_status kvant_tensor_export(const kvant_tensor *tensor, uint32_t block, void *data,
                                           size_t bytes, size_t *used);

/* Replaces a block by an exported one. KVANT_ERR_FORMAT: the data is damaged, of another version or
 * another scheme. KVANT_ERR_FULL: there is no room for its transform or its open page.
 * KVANT_ERR_UNSUPPORTED: this tensor does not hold what the block has, such as shifted keys, its
 * own centre, or matrices of values in a cache on a GPU. The block is then unchanged. Any bytes are
 * safe to pass. */
KVANT_API kvant_status kvant_tensor_import(kvant_tensor *tensor, uint32_t block, const void *data,
                                           size_t bytes);

/* Sets a transform before anything is written, instead of one from the first rows: n_kv_heads x
 * head_dim floats each, copied. NULL: no centre or no scale, or the calibration's. Each kv head
 * uses the parts that its codec's spec asks for. KVANT_ERR_NONFINITE. KVANT_ERR_ARGUMENT: a slot
 * was written already, a scale is not above 0, or no codec of the tensor would use the numbers. */
KVANT_API kvant_status kvant_tensor_set_affine(kvant_tensor *tensor, const kvant_affine *affine);

typedef enum kvant_block_state {
    KVANT_BLOCK_EMPTY = 0,
    KVANT_BLOCK_OPEN = 1,
    KVANT_BLOCK_SINK = 2,
    KVANT_BLOCK_SEALED = 3
} kvant_block_state;

/* One kv head of a block, for inspection; valid until the next write. */
typedef struct kvant_block_info {
    size_t size; /* set by the caller to sizeof(kvant_block_info) */
    kvant_block_state state;
    uint32_t transform_id;    /* the transform; 0: none was made yet, or the calibration's */
    uint64_t written;         /* bit per slot */
    const kvant_codec *codec; /* of the kv head */
    /* Sealed: a page of the codec. Otherwise 64 x head_dim transformed fp16 numbers. Keys that were
     * shifted are in it as before the shift (kvant_tensor_shift). */
    const void *page;
    /* The kv head's centre and scale in all blocks of this transform: head_dim floats each, or
     * NULL. */
    kvant_affine affine;
    /* kvant_rope.block_centers: the transform's centre of a block at position 0. NULL: none. */
    const float *start;
} kvant_block_info;

KVANT_API kvant_status kvant_tensor_get_block(const kvant_tensor *tensor, uint32_t block,
                                              uint32_t kv_head, kvant_block_info *info);

/* Makes a codec like another codec, for the tensor's role and head_dim. The new codec has a kv
 * head's centre, scale and matrix in a block, as if they came from a calibration: rows pass through
 * R W in one product, so the last bits of a row may differ from the tensor's. It serves pages that
 * lie elsewhere, for example on a GPU (kvant_cuda_codec_from, kvant_cuda_codec_tables). The caller
 * frees the codec. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_tensor_make_codec(const kvant_tensor *tensor, uint32_t block,
                                               uint32_t kv_head, const kvant_codec *like,
                                               kvant_codec **codec);

typedef struct kvant_tensor_info {
    size_t size; /* set by the caller to sizeof(kvant_tensor_info) */
    kvant_role role;
    uint32_t n_kv_heads, head_dim, n_blocks, n_open_blocks;
    uint32_t n_transforms; /* transforms in force, including transform 0 */
    size_t bytes;          /* of the tensor's memory */
    size_t sealed_bytes;   /* of one sealed block */
    size_t open_bytes;     /* of one open block */
    size_t written_blocks; /* blocks that are not empty */
    /* In addition to `bytes`: the matrices of transform=first, with a GPU's copies, and shifts. */
    size_t learned_bytes;
    /* The most of the former that one text causes, if it fills all blocks or n_positions: one
     * transform per position bucket, and two early ones. */
    size_t learned_most;
    /* The memory of learning without the matrices, now and at most: second moments, and pending
     * rows and queries. It is freed when learning ends, except for some queries. */
    size_t working_bytes, working_most;
} kvant_tensor_info;

KVANT_API kvant_status kvant_tensor_get_info(const kvant_tensor *tensor, kvant_tensor_info *info);

KVANT_END_C

#endif /* KVANT_TENSOR_H */
