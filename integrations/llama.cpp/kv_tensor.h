/* kv_tensor.h - one cache tensor of llama.cpp (cache_k_l<layer> or cache_v_l<layer>) and the
 * kvant_tensor behind it.
 *
 * llama.cpp sees a nominal fp16 tensor [row, cells, streams] with row = n_kv_heads * head_dim. The
 * plug-in translates: nominal byte offsets are cells, cells are slots, bytes read are decoded rows,
 * bytes written are encoded.
 *
 * llama.cpp asks for the size before head_dim and n_kv_heads are known separately. So a tensor
 * starts unbound: it reserves address space for the largest size that any head_dim gives, and
 * touches none of it. The first attention node that reads the tensor binds it. An unbound tensor
 * stores nothing.
 *
 * Not thread-safe: one context uses its tensors from one thread at a time, as llama.cpp does.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvant/tensor.h>

#include "abi.h"
#include "attributes.h"
#include "invalid.h"
#include "mla.h"
#include "kv_size.h"
#include "placement.h"
#include "settings.h"
#include "state.h"

typedef struct kvp_kv_shape {
    kvant_role role;
    uint32_t layer;
    uint32_t row; /* n_kv_heads * head_dim */
    uint32_t n_cells;
    uint32_t n_streams;
    bool window;   /* the cache of a sliding window; the model has another cache for all tokens */
    bool in_order; /* slots are equal to cells, even with one stream */
    bool latents;  /* rows are both keys and values (mla.h); such tensors are always in order */
} kvp_kv_shape;

struct kvp_layers; /* the state that the tensors of one llama context share */

/* Pending rows: they were written and are not stored yet. */
struct kvp_pending_rows {
    int64_t *cells; /* the allocation, which also holds the following arrays */
    float *rows;
    int32_t *positions; /* or NULL */
    size_t n;
};

/* The most sequences of a placement whose first and newest tokens are kept fp16, if the codec keeps
 * any. Further sequences have no fp16 tokens. */
#define KVP_WINDOW_SEQUENCES 16u

typedef struct kvp_kv kvp_kv;

struct kvant_block_slots; /* kvant/tensor_hooks.h */

/* A block of 64 cells: its cells with rows, and which block of its sequence it is. */
typedef struct kvp_block_state {
    uint64_t written;
    uint32_t index;
} kvp_block_state;

/* Functions for cells outside the computer's memory (gpu/). Rows are fp32, of all kv heads, in the
 * computer's memory. Cells are numbered over all streams. */
typedef struct kvp_remote {
    void *gpu;
    /* Creates kv->cells in kv->memory, which is zeroed, with a codec per kv head. False with a line
     * in err. */
    bool (*create)(kvp_kv *kv, const kvant_codec *const *codecs, uint32_t n_kv_heads,
                   uint32_t head_dim, char *err, size_t errlen);
    void (*destroy)(kvp_kv *kv);
    kvant_status (*read)(const kvp_kv *kv, size_t cell, size_t n, float *rows);
    kvant_status (*write)(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows);
    /* Resets the state of all cells, before their memory is zeroed. Waits for work that uses
     * them. */
    void (*clear)(kvp_kv *kv);
    /* Copies blocks of 64 cells between tensors of one memory without decoding. False when their
     * formats differ. */
    bool (*copy)(const kvp_kv *from, uint32_t first, kvp_kv *to, uint32_t to_first, uint32_t n);
    /* Saved states (state.c). These functions do for blocks of 64 cells what
     * kvant_tensor_get_block, kvant_tensor_record_size and kvant_tensor_export_record do for blocks
     * of a tensor. The last two return KVANT_ERR_UNSUPPORTED for rows that have to be saved as
     * fp16. */
    kvp_block_state (*block_state)(const kvp_kv *kv, uint32_t block);
    kvant_status (*record_size)(const kvp_kv *kv, const struct kvant_block_slots *blocks,
                                uint32_t n, size_t *bytes);
    kvant_status (*export_record)(const kvp_kv *kv, const struct kvant_block_slots *blocks,
                                  uint32_t n, void *data, size_t bytes);
    /* The codecs of kv heads in this memory. */
    const kvant_codec *const *(*codecs)(const kvp_kv *kv);
    /* Replaces n blocks by those of a record. taken[i]: the i-th block came with its codes. All
     * other blocks are unchanged. is_checked: the checksum was compared. Errors as of
     * kvant_tensor_import_record. */
    kvant_status (*restore)(kvp_kv *kv, const struct kvant_block_slots *blocks, uint32_t n,
                            const void *data, size_t bytes, bool is_checked, bool *taken);
    /* Sequences have the rows of these cells. `begins`: of these cells alone, until further calls.
     * `forget_others` forgets all other rows. */
    void (*hold)(kvp_kv *kv, size_t cell, size_t n, bool begins);
    void (*forget_others)(kvp_kv *kv);
} kvp_remote;

struct kvp_kv {
    char name[ABI_MAX_NAME];
    kvp_kv_shape shape;
    const kvp_settings *settings;                /* the context's settings */
    void *memory;                                /* a part of the buffer, zeroed and untouched */
    size_t reserved;                             /* bytes of memory */
    uint32_t head_dim;                           /* 0 while unbound; KVP_MLA_PART for latents */
    const kvant_codec *parts[KVP_MLA_MAX_PARTS]; /* codecs of the parts of latents, once bound */
    kvant_tensor *tensor;                        /* NULL while unbound, and with a remote */
    const kvp_remote *remote;                    /* NULL: the cells are in the computer's memory */
    void *cells;                                 /* created by the remote; NULL while unbound */
    /* the size when all cells are written, once bound */
    kvp_kv_size full;
    /* bytes of the matrices that the codecs copied from a calibration, in the computer's memory */
    size_t calibrated;
    const void *cache; /* equal for all tensors of one buffer */
    /* the shared pages of the buffer for the tensor's role; NULL: the tensor shares none */
    struct kvp_steps *steps;
    /* bytes of the shared pages that are counted with this tensor: all or none */
    size_t shared;
    struct kvp_layers *layers;
    /* the placement that the tensors of a cache with one stream share; NULL: cells are slots */
    kvp_placement *placement;
    /* for each block of the placement, the generation that the tensor knows */
    uint32_t *generations;
    struct kvp_pending_rows pending;
    kvp_invalid invalid; /* cells whose rows were refused */
    kvp_incoming incoming;
    kvp_restored_cells restored;
    /* Position of a single token that is stored and whose queries are not accumulated yet; -1:
     * none. */
    int32_t single_position;
    atomic_size_t beside; /* kvp_kv_extra_bytes, for other threads */
    bool in_place;        /* rows are fp16 where llama.cpp puts them (cpu_rows.h) */
    bool bind_failed;     /* the failure was printed, once and not for every node */
    bool roped;           /* the tensor knows the RoPE of its keys */
};

/* True for a cache tensor that the plug-in compresses. With -sm tensor a device may have no head of
 * some layer. */
bool kvp_kv_is_cache_tensor(const abi_tensor *tensor);

/* Reads the shape of a tensor that kvp_kv_is_cache_tensor. False when it cannot be compressed, with
 * a line in err that says which flag to set. */
bool kvp_kv_shape_read(const abi_tensor *tensor, bool in_order, kvp_kv_shape *shape, char *err,
                       size_t errlen);

/* Begins a llama context. Cache tensors that this thread creates from now on belong to it. Reads
 * the settings; the context keeps them when the environment changes. False with one line in err. */
bool kvp_kv_new_context(char *err, size_t errlen);

/* `kvp_kv_context` returns the context that this thread creates, held until it is released; NULL
 * when there is none. `kvp_kv_context_check` is for the time before its first graph and prints a
 * line when no layer's cache is here. `kvp_kv_context_follows` is for the time before
 * kvp_kv_new_context, when a back end of the same llama context follows: a context without tensors
 * gets none any more, so nothing is printed about it. All functions but the first accept NULL. */
struct kvp_layers *kvp_kv_context(void);
void kvp_kv_context_release(struct kvp_layers *layers);
void kvp_kv_context_check(struct kvp_layers *layers);
void kvp_kv_context_follows(struct kvp_layers *layers);

/* Whether a graph of the context that this thread creates showed that its cache cannot serve the
 * model. The line that says why has been printed. The context gets no memory for its graphs, so its
 * creation fails. */
bool kvp_kv_refused(void);

/* Refuses the tensor's context. Prints a line that says why, but only the first time. */
void kvp_kv_refuse(kvp_kv *kv, const char *format, ...) KVANT_PRINTF(2, 3);

/* Whether the tensor's context was refused. */
bool kvp_kv_is_refused(const kvp_kv *kv);

/* Notes the bytes that attention on the tensor needs on a GPU next to the cache. All layers share
 * them, so the most bytes count. queries: bytes of the layer's queries that are kept for
 * learning. */
void kvp_kv_note_attention(kvp_kv *kv, size_t bytes, size_t queries);

/* Prints the line about a cache on a GPU when the sizes of a graph's tensors are known: then
 * attention's bytes were noted. */
void kvp_kv_graph_is_sized(void);

/* Says, once per context, that an operation other than attention reads the tensor. */
void kvp_kv_note_copies(kvp_kv *kv);

/* Notes that a layer of the context being created has recurrent state. */
void kvp_kv_note_state(uint32_t layer);

/* Says, once per context, that a cache of keys without values stays llama.cpp's own. Examples are
 * an indexer's keys, and MLA's latents where they are not compressed. */
void kvp_kv_note_keys_only(void);

/* `kvp_kv_plans_keys_only`: whether the context is only planned (--fit) and its graph showed that
 * values are read out of the keys. `kvp_kv_plan_keys_only` notes such a graph. */
bool kvp_kv_plans_keys_only(void);
void kvp_kv_plan_keys_only(void);

/* Notes that the cache of a layer was seen in memory of another device. */
void kvp_kv_note_elsewhere(void);

/* Notes that a GPU's codec rotates differently from a CPU's; the line at the start says so. */
void kvp_kv_note_rotation(const kvp_kv *kv);

/* Bytes that hold the cells for every plausible head_dim, or for the given one, in a protected or
 * an ordinary layer. Returns 0 with a line in err when there is no answer. The host ggml asks
 * several times and places the next tensor by the answer, so it depends only on the shape and on
 * the context's settings. */
size_t kvp_kv_reserve(const kvp_kv_shape *shape, char *err, size_t errlen);
/* The same with the given settings instead of the settings of the context that the thread
 * creates. */
size_t kvp_kv_reserve_with(const kvp_settings *settings, const kvp_kv_shape *shape, char *err,
                           size_t errlen);

/* kv_reserve.c. Fills all params except the codecs. The params point to *part, and to step pages
 * without memory. False with a line in err. */
bool kvp_kv_tensor_params(const kvp_kv_shape *shape, const kvp_settings *settings,
                          kvant_tensor_params *params, kvant_exact_part *part, char *err,
                          size_t errlen);

/* `kvp_kv_location`: a tensor's place in the scheme. `kvp_kv_known_head_dim`: the head_dim that the
 * settings or the shape give before a graph does, or 0. */
kvant_scheme_location kvp_kv_location(const kvp_kv_shape *shape, uint32_t n_layers,
                                      uint32_t head_dim);
uint32_t kvp_kv_known_head_dim(const kvp_kv_shape *shape, const kvp_settings *settings);

/* Creates the record of a cache tensor. memory: reserved bytes, zeroed, aligned to
 * KVANT_PAGE_ALIGN, owned by the caller. NULL when out of memory. */
kvp_kv *kvp_kv_create(const char *name, const kvp_kv_shape *shape, void *memory, size_t reserved);

/* The number of positions that a sequence of the tensor's context may have. The cache of a sliding
 * window has fewer cells. */
uint32_t kvp_kv_n_positions(const kvp_kv *kv);

/* The number of layers whose keys are in caches of the tensor's context. */
uint32_t kvp_kv_n_layers(const kvp_kv *kv);

/* Bytes of a cell's row as fp16. */
static inline size_t kvp_kv_row_bytes(const kvp_kv *kv)
{
    return (size_t)kv->shape.row * sizeof(uint16_t);
}

/* llama.cpp's graphs read a multiple of this number of cells (n_kv), which must fit in place. */
#define KVP_CELLS_PADDING 256u

/* kv_fill.c. The number of the tensor's cells that fit into its memory as fp16 rows, where
 * llama.cpp puts them. KVANT_EXACT may allow fewer. The number is a multiple of 256. It is 0 in the
 * computer's memory, and with several streams, whose views lie at nominal strides. */
size_t kvp_kv_cells_in_place(const kvp_kv *kv);

/* The most tokens of a sequence with which the tensor's cache would be f16 itself on a GPU. One
 * layer is compressed before each of the last tokens that fit (gpu/in_place.h), so these tokens do
 * not count. The number subtracts all layers of the context. A cache that has only some of the
 * layers, for a sliding window or on one of several GPUs, is f16 for a few tokens more. A cache
 * that fits as a whole stays f16. */
size_t kvp_kv_tokens_in_place(const kvp_kv *kv, bool on_gpu);

/* Whether a tensor belongs to the model's first layer, or to the first layer with keys and values
 * after recurrent layers. */
bool kvp_kv_is_first(const kvp_kv *kv);

/* The number of blocks of a tensor's cells, all streams. */
uint32_t kvp_kv_blocks(const kvp_kv_shape *shape);

/* The tokens of n_sequences sequences that a tensor keeps as fp16 (scheme.h). On a GPU a stream
 * counts as one sequence. All zeros: only the codecs' options decide. */
kvant_exact_part kvp_kv_exact(const kvp_kv_shape *shape, const kvp_settings *settings,
                              uint32_t n_sequences);

/* A GPU has fp16 pages of 64 rows behind the sealed pages, at the end of the reserved bytes. They
 * take 0 bytes where the context's codecs need none. 136 pages are the exact part of 32 streams;
 * with more pages a step would take long on the host. */
#define KVP_MOST_OPEN 136u
uint32_t kvp_kv_open_pages(const kvp_kv_shape *shape, const kvp_settings *settings);
size_t kvp_kv_open_bytes(const kvp_kv_shape *shape, const kvp_settings *settings);

/* Whether some layer's codec, in the role of the shape, may have groups of several tokens. */
bool kvp_kv_may_have_groups(const kvp_kv_shape *shape, const kvp_settings *settings);

/* Whether keys of some layer learn a transform. */
bool kvp_kv_learns(const kvp_settings *settings);

/* The settings of the context that this thread creates; NULL when there is none. */
const kvp_settings *kvp_kv_current_settings(void);

/* kv_size.c. `kvp_kv_full_size` computes the size of a bound tensor with all cells written; codecs
 * are its kv heads'. False for a tensor on a GPU whose size elsewhere is wanted. `kvp_kv_size_now`
 * finds the codecs itself. `kvp_kv_size_add` adds a part to a sum. */
bool kvp_kv_full_size(const kvp_kv *kv, const kvant_codec *const *codecs, bool on_gpu,
                      kvp_kv_size *size);
size_t kvp_kv_calibrated_bytes(const kvant_codec *const *codecs, uint32_t n_kv_heads);
/* The most bytes that a tensor's transforms and its learning take for the first n_positions
 * positions of a sequence. The tensor forgets how RoPE rotates its keys. */
kvant_tensor_info kvp_kv_info_up_to(const kvp_kv *kv, uint32_t n_positions);
void kvp_kv_size_add(kvp_kv_size *sum, const kvp_kv_size *part);
bool kvp_kv_size_now(const kvp_kv *kv, bool on_gpu, kvp_kv_size *size);

/* The codecs of a bound tensor's kv heads, or NULL. */
const kvant_codec *const *kvp_kv_codecs(const kvp_kv *kv);

/* kv_fill.c. Computes the size of a bound tensor when each of its streams has `tokens` tokens
 * (kv_fill.h). */
bool kvp_kv_size_at(const kvp_kv *kv, bool on_gpu, double tokens, kvp_kv_size *size);

void kvp_kv_free(kvp_kv *kv);

/* Bytes in the computer's memory outside the buffer: learned and calibrated matrices, learning's
 * working memory, pending rows. Any thread may ask. The context's thread calls kvp_kv_count after
 * each change. */
size_t kvp_kv_extra_bytes(kvp_kv *kv);
void kvp_kv_count(kvp_kv *kv);

/* Fixes head_dim and creates the cells. True when head_dim is fixed to this value, now or before.
 * Prints the reason for a failure once. The tensors of all layers must have been created. */
bool kvp_kv_bind(kvp_kv *kv, uint32_t head_dim);

static inline bool kvp_kv_is_bound(const kvp_kv *kv)
{
    return kv->tensor != NULL || kv->cells != NULL;
}

/* Whether there are cells. Binds to the settings' head_dim when no node did. */
bool kvp_kv_ready(kvp_kv *kv);

/* Creates the cells again, empty, in memory that is zeroed; false with a line in err. */
bool kvp_kv_create_tensor(kvp_kv *kv, uint32_t head_dim, char *err, size_t errlen);

/* Gives the tensor the placement of its cache (n_streams 1), before anything is written. */
bool kvp_kv_set_placement(kvp_kv *kv, kvp_placement *placement);

/* New rows of a tensor, row i at `at` + i * stride. */
typedef struct kvp_rows {
    kvp_kv *kv;
    const float *at;
    size_t stride;
    /* positions of keys (rope.h); NULL: rows are in the order of positions */
    const int32_t *positions;
} kvp_rows;

/* The row of a single token in a layer's keys and values, which the layer's attention node stores
 * (kvant_attention_step_run). A held row lies in the memory of its graph. */
typedef struct kvp_held_row {
    bool is_held;
    kvp_rows rows[2];
    int64_t cell, slot;
} kvp_held_row;

/* `kvp_kv_enter` takes new rows for the cells. Refused rows make their cells invalid, which is no
 * error. The rows belong to one tensor, or to the keys and the values of a layer, which have the
 * same cells and the same placement or none. When only a mask shows their slots, the rows stay
 * pending until kvp_kv_flush. Every other function here flushes without a mask when it must.
 * With `held`, the row of a single token may be held instead. Then the caller has to store it
 * (kv_store.h). */
kvant_status kvp_kv_enter(const kvp_rows *rows, size_t n_tensors, const int64_t *cells, size_t n,
                          uint32_t n_threads, kvp_held_row *held);
kvant_status kvp_kv_flush(kvp_kv *kv, const kvp_mask *mask, uint32_t n_threads);

/* Drops pending rows. */
void kvp_kv_drop_pending(kvp_kv *kv);

/* The slot of a cell. Cells are numbered over all streams, and each stream begins with its own
 * block. -1 when a placement has no slot for the cell, so it was never written. */
static inline int64_t kvp_kv_slot(const kvp_kv *kv, int64_t cell)
{
    if (kv->placement != NULL)
        return kvp_placement_slot(kv->placement, (uint32_t)cell);
    int64_t n = kv->shape.n_cells,
            padded = (n + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;

    return cell / n * padded + cell % n;
}

/* Decodes n cells from the first on. Cells that were never written are zeros, or the centre where
 * there is one. Invalid cells are NaN. */
kvant_status kvp_kv_read_rows(const kvp_kv *kv, size_t cell, size_t n, float *rows);

/* Cells that a call outside of graphs translates at a time. A restored cache learns its centre from
 * the first of these batches (center=first), so a batch should be as long as a prompt's batch. */
#define KVP_MOST_CELLS 512u

/* Stores at most KVP_MOST_CELLS rows, outside of graphs. Refused rows make their cells invalid. */
void kvp_kv_store_rows(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows);

/* Tells the tensor that another sequence, or another part of one, uses a block of its placement
 * from now on, if its generation has changed. The block is then empty. */
kvant_status kvp_kv_assign_block(kvp_kv *kv, uint32_t block);

/* Writes at most KVP_MOST_CELLS cells that have slots. Refused rows make their cells invalid. */
kvant_status kvp_kv_write_rows(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows,
                               uint32_t n_threads);

/* Nominal bytes of one stream. */
size_t kvp_kv_stream_bytes(const kvp_kv *kv);

/* Transfers nominal fp16 bytes offset .. offset + size - 1. Rows may be partial: reading decodes
 * the row and copies a part; writing decodes, replaces and encodes again. Whole rows may be codes
 * instead (state.h). A failure to read is
 * printed, and false is returned. There is no way to tell llama.cpp of a failure to write. So cells
 * whose rows cannot be stored become invalid (invalid.h). Cells of unbound tensors become invalid,
 * too, unless zeros are written.
 */
bool kvp_kv_read(kvp_kv *kv, size_t offset, size_t size, void *out);

/* The same without codes: all rows are fp16. */
bool kvp_kv_read_nominal(kvp_kv *kv, size_t offset, size_t size, void *out);
void kvp_kv_write(kvp_kv *kv, size_t offset, size_t size, const void *data);
void kvp_kv_fill(kvp_kv *kv, size_t offset, size_t size, uint8_t value);

/* Makes all cells unwritten and gives their memory back to the system; head_dim stays. */
void kvp_kv_clear(kvp_kv *kv);

/* Copies one stream's compressed bytes. False when the tensors' formats differ; then the caller
 * copies rows. */
bool kvp_kv_copy_stream(const kvp_kv *from, uint32_t from_stream, kvp_kv *to, uint32_t to_stream);
