/* tensor.h - the keys or the values of one layer as compressed pages, addressed by slot: for
 * engines that manage blocks themselves.
 *
 * A block holds 64 token positions: one page per kv head. A slot is the place of one token, 64 x
 * block + offset. The engine decides which token goes to which slot, and writes slots in any order
 * and as often as it likes. Engines that want the library to manage blocks use cache.h, which is
 * made of tensors.
 *
 * States of a block (architecture.md has the diagram):
 *
 *   empty    no slot was written
 *   open     transformed fp16 rows: the exact part, block_tokens or recent_tokens of the codec ask
 *            for it, or no version is known yet, or a sealed block is being rewritten
 *   sink     fp16 for good: the block holds one of the first tokens of its sequence
 *   sealed   codes
 *
 * With an exact part (kvant_exact_part) every row is fp16 first. A write seals what left the window
 * of the newest rows before it, so that attention to the rows of a write reads them as they came.
 * All sequences share one pool of open blocks. When it is full, sequences that are not written give
 * way: their newest tokens first, their first tokens last. Tensors that are written one after another
 * may share the memory for the rows of a write (kvant_step_pages).
 *
 * Versions. With center=first or norm=first in a codec's spec, centre and scale per channel come
 * from the rows themselves. The tensor keeps a few versions of them. Rows wait in open blocks until
 * 64 rows were seen; then the first version is made. A batch of rows that an existing version would
 * quantise much worse than a new one gets a new version. A block remembers its version, and
 * attention handles blocks of different versions exactly, so a version never changes. The
 * statistics are robust: a few rows far from all others do not move them.
 * learning.md has the rules.
 *
 * Kv heads may have codecs of different specs and sizes. They must agree in role, head_dim,
 * sink_tokens, recent_tokens and block_tokens, because a block is open or sealed for all its kv
 * heads at once.
 *
 * Memory is the caller's: one span, so that an engine's own allocator sees it. Pages of blocks that
 * were never written are never touched: lazily zeroed memory stays unused until then.
 *
 * Threads: one writer at a time and no reader beside it; any number of readers at once. Stack: 64
 * KiB are enough for every call.
 */
#ifndef KVANT_TENSOR_H
#define KVANT_TENSOR_H

#include <kvant/codec.h>

KVANT_BEGIN_C

#define KVANT_MAX_VERSIONS 12u

typedef struct kvant_tensor kvant_tensor;

/* The tokens that a cache keeps as fp16, whatever its codecs are (kvant_scheme_exact). A block is
 * open or sealed as a whole, so up to a block more of each sequence may be exact. */
typedef struct kvant_exact_part {
    size_t size;     /* set by the caller to sizeof(kvant_exact_part) */
    uint32_t first;  /* of each sequence, a multiple of 64; 0: none, nor sinks that a codec has */
    uint32_t newest; /* of each sequence: the tokens written last */
    /* Of all sequences together: memory is for this many, and for one block more. Where sequences
     * would need more, those that were not written for longest are sealed first. At least first +
     * newest. */
    uint32_t total;
    /* Rows of one write that stay exact until the next write, so that queries of the same batch see
     * them as they came. Memory is for this many, too, unless the tensor has kvant_step_pages. The
     * first rows of a longer write are sealed at once. */
    uint32_t step;
} kvant_exact_part;

/* Memory for the rows of a step that tensors share, when an engine writes them one after another
 * and attends to each of them before it writes the next one: the keys of a cache's layers, or the
 * values. It belongs to the tensor that used it last. When another tensor needs it, the rows of
 * that one are sealed, or move to its own memory as far as they are among its newest. So a tensor
 * needs no room for a step of its own, and its rows stay readable at any time. They are exact until
 * another of the tensors is written. */
typedef struct kvant_step_pages {
    size_t size;         /* set by the caller to sizeof(kvant_step_pages) */
    void *memory;        /* aligned to KVANT_PAGE_ALIGN */
    size_t bytes;        /* a tensor has room for as many blocks of fp16 rows as fit */
    kvant_tensor *owner; /* kvant's; NULL at first */
} kvant_step_pages;

typedef struct kvant_tensor_params {
    size_t size; /* set by the caller to sizeof(kvant_tensor_params) */
    const kvant_codec *const
        *codecs; /* one per kv head; the array is copied, the codecs are borrowed */
    uint32_t n_kv_heads;
    uint32_t n_sequences; /* each sequence keeps its sinks and its newest rows as fp16 */
    uint32_t n_blocks;    /* of all sequences */
    /* Blocks per sequence, for engines with a fixed share each: block b is the (b % n)th of
     * sequence b / n. 0: blocks belong to sequence 0 in their order until kvant_tensor_assign says
     * otherwise. */
    uint32_t blocks_per_sequence;
    uint32_t n_open_blocks; /* open blocks, sinks not counted; 0: as many as the codecs need */
    /* Bytes from one block's pages to the next block's, for memory that holds other things between
     * them: a multiple of KVANT_PAGE_ALIGN. 0: blocks follow each other. Codecs that also keep
     * fp16 rows cannot have it. */
    size_t block_stride;
    /* What the cache keeps as fp16 next to what the codecs ask for: the larger of both counts.
     * NULL: the codecs alone say. Tensors whose codecs store fp16 rows ignore it. */
    const kvant_exact_part *exact;
    /* Where the rows of a step are, in place of exact->step rows of the tensor's own memory; they
     * outlive the tensor. One writer at a time for all tensors that share them. NULL: the tensor
     * shares nothing. For tensors in the computer's memory; without an exact part nothing uses
     * them. With several sequences the tensor has room for up to step more exact rows of them. */
    kvant_step_pages *steps;
} kvant_tensor_params;

/* *bytes = what kvant_tensor_create needs. KVANT_ERR_ARGUMENT with the reason in
 * kvant_error_message(), KVANT_ERR_MEMORY when the size overflows. */
KVANT_API kvant_status kvant_tensor_size(const kvant_tensor_params *params, size_t *bytes);

/* Creates a tensor in memory: kvant_tensor_size bytes, aligned to KVANT_PAGE_ALIGN, zeroed, which
 * stay the caller's and outlive the tensor. KVANT_ERR_UNSUPPORTED when a codec needs a calibration
 * and was created without one. */
KVANT_API kvant_status kvant_tensor_create(const kvant_tensor_params *params, void *memory,
                                           kvant_tensor **tensor);

/* Frees the tensor, not its memory, and sets *tensor to NULL; NULL and a pointer to NULL are
 * fine. */
KVANT_API void kvant_tensor_free(kvant_tensor **tensor);

/* Says that block is the index-th of a sequence, which decides whether it is a sink and whose
 * newest rows it holds. Only for an empty block and where blocks_per_sequence is 0:
 * KVANT_ERR_ARGUMENT otherwise. */
KVANT_API kvant_status kvant_tensor_assign(kvant_tensor *tensor, uint32_t block, uint32_t sequence,
                                           uint32_t index);

/* Writes n rows, row i (n_kv_heads x head_dim floats at rows + i * stride) to slots[i]; where slots
 * repeat, the last row stays. All or nothing: every row is checked first, and on an error nothing
 * of the call is stored, marked or learnt from.
 * KVANT_ERR_NONFINITE, KVANT_ERR_RANGE, KVANT_ERR_ARGUMENT. n_threads >= 1 bounds the threads used;
 * bytes do not depend on it. */
KVANT_API kvant_status kvant_tensor_write(kvant_tensor *tensor, const int64_t *slots, size_t n,
                                          const float *rows, size_t stride, uint32_t n_threads);

/* The same for the keys and the values of a layer, at the same slots: all or nothing for both. Kv
 * heads of both are encoded in one loop, which for a single token wastes fewer threads than two. */
KVANT_API kvant_status kvant_tensor_write_layer(kvant_tensor *k, kvant_tensor *v,
                                                const int64_t *slots, size_t n, const float *k_rows,
                                                size_t k_stride, const float *v_rows,
                                                size_t v_stride, uint32_t n_threads);

/* Queries of tokens, for transform=first: query head h of token t is head_dim floats at q + t *
 * token_stride + h * head_stride. Heads that share a kv head follow each other. */
typedef struct kvant_queries {
    size_t size; /* set by the caller to sizeof(kvant_queries) */
    const float *q;
    size_t token_stride, head_stride;
    uint32_t n_tokens, n_heads;
    const int32_t
        *positions; /* per token, for kvant_rope; NULL: they follow the row written last */
} kvant_queries;

/* Notes queries, from which the next write to the keys learns. Those of the same tokens, before the
 * keys are written, serve best; without queries there is no matrix. A writer's call. Queries that are
 * not finite are left out. kvant_tensor_wants_queries: whether those of n_tokens tokens would be
 * looked at; never where no codec has transform=first, and once enough was learnt only those of long
 * batches. Once there are 8 queries per channel, of tokens that come alone one in 8 is looked at. */
KVANT_API kvant_status kvant_tensor_note_queries(kvant_tensor *tensor, const kvant_queries *queries,
                                                 uint32_t n_threads);
KVANT_API int kvant_tensor_wants_queries(const kvant_tensor *tensor, size_t n_tokens);

/* RoPE: how keys and queries turn with their positions. Slow pairs of channels go on turning long after
 * enough was learnt; with this, versions are made for positions that no row has had yet. */
typedef struct kvant_rope {
    size_t size;     /* set by the caller to sizeof(kvant_rope) */
    uint32_t n_dims; /* the first channels of a head turn; even */
    uint32_t
        interleaved; /* not 0: pairs are channels (2i, 2i + 1); otherwise (i, i + n_dims / 2) */
    const float *frequencies; /* n_dims / 2, radians per position; copied */
    uint32_t n_positions;     /* that a sequence may have; 0: as many as there are slots */
    uint32_t n_ranges; /* versions that share the positions; 0: as many as pay; 1: one for all */
    uint32_t
        block_centers; /* not 0: each block has a centre of its own, the mean of keys at its positions */
} kvant_rope;

/* For keys with transform=first; nothing happens for other tensors. Versions in force stay; where the
 * rope is another than before (NULL: none), what was learnt for later ones is forgotten. A writer's call.
 * KVANT_ERR_ARGUMENT, KVANT_ERR_NONFINITE for frequencies, KVANT_ERR_MEMORY, KVANT_ERR_UNSUPPORTED for block_centers of a
 * kvant_cache on a GPU. */
KVANT_API kvant_status kvant_tensor_set_rope(kvant_tensor *tensor, const kvant_rope *rope);

/* Positions of the n rows of the next write, which borrows them. Otherwise a row's position is its place
 * in its sequence: 64 x index of the block + offset. Below 0: not known; nothing is learnt from the row. */
KVANT_API kvant_status kvant_tensor_next_positions(kvant_tensor *tensor, const int32_t *positions,
                                                   size_t n);

/* Keys move to other positions without being encoded again: slot i of the first n by by[i]
 * positions, as if RoPE had turned them that much further. by[i] = KVANT_ANY_SHIFT says that
 * nobody reads the slot before it is written again. Reading, attention, copies and exports give
 * the shifted keys; rows that are written later are at their own positions. rope: of the keys;
 * its first four fields count, and they stay the same while a slot is shifted. A tensor has at
 * most 32 different sums of shifts at a time. Where a call needs more, all shifted keys are
 * encoded once more. Takes about 12 ns per slot. A writer's call. On an error the keys
 * are where they were: KVANT_ERR_ARGUMENT (values, a shift beyond 2^30), KVANT_ERR_UNSUPPORTED
 * (a kvant_cache on a GPU, a channel that turns with no other one), KVANT_ERR_FULL (more than 32
 * in one call), KVANT_ERR_MEMORY, KVANT_ERR_RANGE. */
#define KVANT_ANY_SHIFT INT32_MIN
KVANT_API kvant_status kvant_tensor_shift(kvant_tensor *tensor, const kvant_rope *rope,
                                          const int32_t *by, size_t n, uint32_t n_threads);

/* Reads n slots in any order into n rows, with at most n_threads threads (at least 1); slots never
 * written give zeros, or the centre where there is one. A negative slot gives zeros. */
KVANT_API kvant_status kvant_tensor_read_slots(const kvant_tensor *tensor, const int64_t *slots,
                                               size_t n, float *rows, size_t stride,
                                               uint32_t n_threads);

/* Reads the n slots from first on in one thread. */
KVANT_API kvant_status kvant_tensor_read(const kvant_tensor *tensor, size_t first, size_t n,
                                         float *rows, size_t stride);

/* Makes n blocks from first on empty. kvant_tensor_clear also forgets the versions. Only memory
 * that was written is touched. */
KVANT_API kvant_status kvant_tensor_clear_blocks(kvant_tensor *tensor, uint32_t first, uint32_t n);
KVANT_API void kvant_tensor_clear(kvant_tensor *tensor);

/* Copies n blocks, bytes as they are, between tensors of the same codecs, or within one (spans that
 * overlap: KVANT_ERR_ARGUMENT). The targets become equal to the sources, empty ones too.
 * KVANT_ERR_FULL when the target has no place for the versions or the open pages of the blocks:
 * copy by reading and writing then. On an error the target's blocks are as before. */
KVANT_API kvant_status kvant_tensor_copy(const kvant_tensor *from, uint32_t first, kvant_tensor *to,
                                         uint32_t to_first, uint32_t n);

/* A block as bytes that another process, machine or device imports: pages, which slots are written,
 * codec specs, centre and scale, a checksum (format.md, "Blocks"). kvant_tensor_export_size is
 * the most that one block takes. */
KVANT_API size_t kvant_tensor_export_size(const kvant_tensor *tensor);

/* *used bytes are written. Slots that are not written leave no bit. KVANT_ERR_ARGUMENT when bytes
 * is too small, KVANT_ERR_MEMORY; what data holds then is not specified. */
KVANT_API kvant_status kvant_tensor_export(const kvant_tensor *tensor, uint32_t block, void *data,
                                           size_t bytes, size_t *used);

/* Replaces a block by an exported one. KVANT_ERR_FORMAT: damaged, of another version or another
 * scheme; KVANT_ERR_FULL: no place for its version or its open page. The block is then as before.
 * Any bytes are safe to pass. */
KVANT_API kvant_status kvant_tensor_import(kvant_tensor *tensor, uint32_t block, const void *data,
                                           size_t bytes);

/* Gives a version before anything is written, in place of one from the first rows: n_kv_heads x
 * head_dim floats each, copied; NULL for no centre or no scale, or the calibration's. Each kv head
 * uses what its codec's spec asks for. KVANT_ERR_NONFINITE. KVANT_ERR_ARGUMENT once a slot is
 * written, for a scale not above 0, and for numbers that no codec of the tensor would use. */
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
    uint32_t version;         /* 0: before any version was made, or the calibration's */
    uint64_t written;         /* bit per slot */
    const kvant_codec *codec; /* the kv head's */
    /* Keys that were shifted are in it as they were before (kvant_tensor_shift). */
    const void
        *page; /* sealed: a page of the codec; otherwise 64 x head_dim transformed fp16 numbers */
    kvant_affine
        affine; /* of the kv head: head_dim floats each, or NULL. What its version's blocks share */
    const float *
        start; /* kvant_rope.block_centers: the version's centre of a block at position 0; NULL: it has none */
} kvant_block_info;

KVANT_API kvant_status kvant_tensor_get_block(const kvant_tensor *tensor, uint32_t block,
                                              uint32_t kv_head, kvant_block_info *info);

/* Makes a codec like another one, of the tensor's role and head_dim, with the centre, scale and matrix
 * that a kv head has in a block's version, as if a calibration gave them: for pages that lie elsewhere,
 * as on a GPU (kvant_cuda_codec_from, kvant_cuda_codec_tables). The caller frees it.
 * KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_tensor_make_codec(const kvant_tensor *tensor, uint32_t block,
                                               uint32_t kv_head, const kvant_codec *like,
                                               kvant_codec **codec);

typedef struct kvant_tensor_info {
    size_t size; /* set by the caller to sizeof(kvant_tensor_info) */
    kvant_role role;
    uint32_t n_kv_heads, head_dim, n_blocks, n_open_blocks;
    uint32_t n_versions;   /* alive, the initial one counted */
    size_t bytes;          /* of the memory */
    size_t sealed_bytes;   /* of one sealed block */
    size_t open_bytes;     /* of one open block */
    size_t written_blocks; /* blocks that are not empty */
    /* Next to the memory: matrices of transform=first, a GPU's copies counted, and shifts. */
    size_t learnt_bytes;
    size_t learnt_most; /* of a text of all blocks or n_positions: one per octave, two early ones */
    /* What learning takes beside the matrices, now and at most: sums, and rows and queries that
     * wait for a judgement. When learning ends the system has it back, but for a few queries. */
    size_t working_bytes, working_most;
} kvant_tensor_info;

KVANT_API kvant_status kvant_tensor_get_info(const kvant_tensor *tensor, kvant_tensor_info *info);

KVANT_END_C

#endif /* KVANT_TENSOR_H */
