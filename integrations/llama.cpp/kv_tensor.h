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
#ifndef KVP_KV_TENSOR_H
#define KVP_KV_TENSOR_H

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

typedef struct kvp_kv_shape {
    kvant_role role;
    uint32_t layer;
    uint32_t row; /* n_kv_heads * head_dim */
    uint32_t n_cells;
    uint32_t n_streams;
    bool window;   /* the cache of a sliding window, next to one of all tokens */
    bool in_order; /* cells are slots, with one stream, too */
    bool latents;  /* keys that are values, too (mla.h); always in order */
} kvp_kv_shape;

struct kvp_layers; /* what the tensors of one llama context know of each other */

/* Rows that entered and are not stored yet. */
struct kvp_waiting {
    int64_t *cells; /* and behind them the rest, in one allocation */
    float *rows;
    int32_t *positions; /* or NULL */
    size_t n;
};

/* Sequences of a placement whose first and newest tokens are kept fp16, where the codec keeps
 * some. */
#define KVP_WINDOW_SEQUENCES 16u

typedef struct kvp_kv kvp_kv;

/* Cells in a memory that is not the computer's (gpu/). Rows are fp32, of all kv heads, in the
 * computer's memory; cells are numbered over all streams. */
typedef struct kvp_remote {
    void *gpu;
    /* Makes kv->cells in kv->memory, which is zeroed, of a codec per kv head; false with a line in
     * err. */
    bool (*create)(kvp_kv *kv, const kvant_codec *const *codecs, uint32_t n_kv_heads,
                   uint32_t head_dim, char *err, size_t errlen);
    void (*destroy)(kvp_kv *kv);
    kvant_status (*read)(const kvp_kv *kv, size_t cell, size_t n, float *rows);
    kvant_status (*write)(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows);
    /* Forgets what is known of cells; their memory is zeroed next. Waits for work on them. */
    void (*clear)(kvp_kv *kv);
    /* Blocks of 64 cells as they are, between tensors of one memory; false when they are not
     * alike. */
    bool (*copy)(const kvp_kv *from, uint32_t first, kvp_kv *to, uint32_t to_first, uint32_t n);
} kvp_remote;

struct kvp_kv {
    char name[ABI_MAX_NAME];
    kvp_kv_shape shape;
    const kvp_settings *settings;                /* the context's */
    void *memory;                                /* the buffer's, zeroed and untouched */
    size_t reserved;                             /* bytes of it */
    uint32_t head_dim;                           /* 0 while unbound; of latents: KVP_MLA_PART */
    const kvant_codec *parts[KVP_MLA_MAX_PARTS]; /* of latents, once bound */
    kvant_tensor *tensor;                        /* NULL while unbound, and with a remote */
    const kvp_remote *remote;                    /* NULL: the cells are in the computer's memory */
    void *cells;                                 /* the remote's, NULL while unbound */
    kvp_kv_size full;                            /* once bound: when all cells are written */
    size_t
        calibrated; /* bytes of its codecs' matrices from a calibration, in the computer's memory */
    const void *cache;       /* the same for the tensors of one buffer */
    struct kvp_steps *steps; /* the buffer's, of the tensor's role; NULL: the tensor shares none */
    size_t shared;           /* bytes of them that are counted with this tensor: all, or none */
    struct kvp_layers *layers;
    kvp_placement
        *placement; /* of a cache with one stream, shared by its tensors; NULL: cells are slots */
    uint32_t *generations; /* of each of its blocks, as the tensor knows it */
    struct kvp_waiting waiting;
    kvp_invalid invalid; /* cells whose rows were refused */
    /* position of a token that came alone and is stored, while its queries are still to be noted;
     * else -1 */
    int32_t alone;
    atomic_size_t beside; /* kvp_kv_bytes_beside: what other threads may read */
    bool bind_failed;     /* said once, not for every node */
    bool roped;           /* the tensor was told the RoPE of its keys */
};

/* True for a cache tensor that the plug-in compresses. With -sm tensor a device may have no head of
 * a layer. */
bool kvp_kv_names(const abi_tensor *tensor);

/* Reads the shape of a tensor that kvp_kv_names; false, with a line in err that says which flag to
 * set, when it is not one that can be compressed. */
bool kvp_kv_shape_read(const abi_tensor *tensor, bool in_order, kvp_kv_shape *shape, char *err,
                       size_t errlen);

/* Begins a llama context: cache tensors that this thread creates from now on are its layers.
 * Reads the settings; the context keeps them when the environment changes. False with one line
 * in err. */
bool kvp_kv_new_context(char *err, size_t errlen);

/* The context that this thread creates, held until it is released; NULL when there is none. check:
 * before its first graph, says when no layer's cache came here. NULL is fine for both. */
struct kvp_layers *kvp_kv_context(void);
void kvp_kv_context_release(struct kvp_layers *layers);
void kvp_kv_context_check(struct kvp_layers *layers);

/* Whether a graph of the context that this thread creates showed that its cache cannot serve the
 * model. The line that says why is printed; the context gets no memory for its graphs, so its
 * creation fails. */
bool kvp_kv_refused(void);

/* Refuses the tensor's context, with a line that says why: the first time only. */
void kvp_kv_refuse(kvp_kv *kv, const char *format, ...) KVP_PRINTF(2, 3);

/* Whether the tensor's context was refused. */
bool kvp_kv_is_refused(const kvp_kv *kv);

/* An operation that is not attention reads the tensor: says so, once per context. */
void kvp_kv_note_copies(kvp_kv *kv);

/* A layer of the context being created has recurrent state. */
void kvp_kv_note_state(uint32_t layer);

/* A cache of keys without values (an indexer, MLA where it is not compressed) stays llama.cpp's
 * own: says so, once per context. */
void kvp_kv_note_keys_alone(void);

/* Whether the context is only planned (--fit), and its graph showed that values are read out of the
 * keys. */
bool kvp_kv_plans_keys_alone(void);
void kvp_kv_plan_keys_alone(void);

/* The cache of a layer was seen in memory that is not ours. */
void kvp_kv_note_elsewhere(void);

/* Notes that a GPU's codec rotates differently from a CPU's; the line at the start says so. */
void kvp_kv_note_rotation(const kvp_kv *kv);

/* Bytes that hold the cells for every plausible head_dim (or for the given one), whether the layer
 * is a protected one or not; 0 with a line in err. ggml asks several times and places the next
 * tensor by the answer, which depends on the shape and on the context's settings alone. */
size_t kvp_kv_reserve(const kvp_kv_shape *shape, char *err, size_t errlen);
/* The same with a context's settings, not with those of the one that the thread creates. */
size_t kvp_kv_reserve_with(const kvp_settings *settings, const kvp_kv_shape *shape, char *err,
                           size_t errlen);

/* kv_reserve.c. All of the params but the codecs; they point to the part, and to step pages that
 * hold nothing. False with a line in err. */
bool kvp_kv_tensor_params(const kvp_kv_shape *shape, const kvp_settings *settings,
                          kvant_tensor_params *params, kvant_exact_part *part, char *err,
                          size_t errlen);

/* A tensor's place in the scheme; head_dim where something tells it before the graph does, else
 * 0. */
kvant_scheme_place kvp_kv_place(const kvp_kv_shape *shape, uint32_t n_layers, uint32_t head_dim);
uint32_t kvp_kv_given_head_dim(const kvp_kv_shape *shape, const kvp_settings *settings);

/* memory: reserved bytes, zeroed, aligned to KVANT_PAGE_ALIGN, owned by the caller. NULL when out
 * of memory. */
kvp_kv *kvp_kv_create(const char *name, const kvp_kv_shape *shape, void *memory, size_t reserved);

/* Positions that a sequence of the tensor's context may have: a sliding window's cache has fewer
 * cells. */
uint32_t kvp_kv_n_positions(const kvp_kv *kv);

/* Layers whose keys are in caches of the tensor's context. */
uint32_t kvp_kv_n_layers(const kvp_kv *kv);

/* Bytes of a cell's row as fp16. */
static inline size_t kvp_kv_row_bytes(const kvp_kv *kv)
{
    return (size_t)kv->shape.row * sizeof(uint16_t);
}

/* llama.cpp's graphs read a multiple of this number of cells (n_kv), which must fit in place. */
#define KVP_CELLS_PADDING 256u

/* kv_fill.c. Tells how many of the tensor's cells fit into its memory as fp16 rows, where llama.cpp
 * puts them. KVANT_EXACT may allow fewer. The number is a multiple of 256. It is 0 with several
 * streams, whose views lie at nominal strides, and in the computer's memory. */
size_t kvp_kv_cells_in_place(const kvp_kv *kv);

/* Tells up to how many tokens of a sequence the tensor's cache would be f16 itself on a GPU. One
 * layer is compressed before each of the last tokens that fit (gpu/in_place.h), so these do not
 * count. The number subtracts all layers of the context. A cache that has only some of them, for a
 * sliding window or on one of several GPUs, is f16 for a few tokens more. A cache that fits as a
 * whole stays f16. */
size_t kvp_kv_tokens_in_place(const kvp_kv *kv);

/* Whether a tensor is of the model's first layer, or of the first one with keys and values: only
 * recurrent ones are before it. */
bool kvp_kv_is_first(const kvp_kv *kv);

/* Blocks of a tensor's cells, all streams. */
uint32_t kvp_kv_blocks(const kvp_kv_shape *shape);

/* Tells which tokens of so many sequences a tensor keeps as fp16 (scheme.h). On a GPU a stream
 * counts as one sequence. Zeros: the codecs alone say it. */
kvant_exact_part kvp_kv_exact(const kvp_kv_shape *shape, const kvp_settings *settings,
                              uint32_t n_sequences);

/* A GPU has fp16 pages of 64 rows behind the sealed pages, at the end of the reserved bytes. They
 * take 0 bytes where the context's codecs need none. With more than 136 pages a step would take
 * long on the host: that is the exact part of 32 streams. */
#define KVP_MOST_OPEN 136u
uint32_t kvp_kv_open_pages(const kvp_kv_shape *shape, const kvp_settings *settings);
size_t kvp_kv_open_bytes(const kvp_kv_shape *shape, const kvp_settings *settings);

/* Whether keys of some layer learn matrices. */
bool kvp_kv_learns(const kvp_settings *settings);

/* The settings of the context that this thread creates; NULL when there is none. */
const kvp_settings *kvp_kv_current_settings(void);

/* kv_size.c. Tells the bytes of a bound tensor with all cells written; codecs are its kv heads'.
 * False for a tensor on a GPU whose size elsewhere is wanted. kvp_kv_size_now finds the codecs.
 * kvp_kv_size_add adds a part to a sum. */
bool kvp_kv_full_size(const kvp_kv *kv, const kvant_codec *const *codecs, bool on_gpu,
                      kvp_kv_size *size);
size_t kvp_kv_calibrated_bytes(const kvant_codec *const *codecs, uint32_t n_kv_heads);
/* Tells the most that a tensor's matrices and its learning take for the first n_positions positions
 * of a sequence. The tensor forgets how RoPE rotates its keys. */
kvant_tensor_info kvp_kv_info_up_to(const kvp_kv *kv, uint32_t n_positions);
void kvp_kv_size_add(kvp_kv_size *sum, const kvp_kv_size *part);
bool kvp_kv_size_now(const kvp_kv *kv, bool on_gpu, kvp_kv_size *size);

/* The codecs of a bound tensor's kv heads; NULL: there are none. */
const kvant_codec *const *kvp_kv_codecs(const kvp_kv *kv);

/* kv_fill.c. Tells the bytes of a bound tensor when each of its streams has `tokens` tokens
 * (kv_fill.h). */
bool kvp_kv_size_at(const kvp_kv *kv, bool on_gpu, double tokens, kvp_kv_size *size);

void kvp_kv_free(kvp_kv *kv);

/* Bytes in the computer's memory next to the buffer's: learned and calibrated matrices, learning's
 * working memory, rows that wait. Any thread may ask. The context's thread calls kvp_kv_count after
 * each change. */
size_t kvp_kv_bytes_beside(kvp_kv *kv);
void kvp_kv_count(kvp_kv *kv);

/* Fixes head_dim and creates the cells; true when it is (already) fixed to this one. Prints why
 * not, once. The tensors of all layers must have been created. */
bool kvp_kv_bind(kvp_kv *kv, uint32_t head_dim);

static inline bool kvp_kv_is_bound(const kvp_kv *kv)
{
    return kv->tensor != NULL || kv->cells != NULL;
}

/* Whether there are cells: binds to the settings' head_dim when nothing else did. */
bool kvp_kv_ready(kvp_kv *kv);

/* The cells again, empty, in memory that is zeroed; false with a line in err. */
bool kvp_kv_create_tensor(kvp_kv *kv, uint32_t head_dim, char *err, size_t errlen);

/* Gives the tensor the placement of its cache (n_streams 1), before anything is written. */
bool kvp_kv_set_placement(kvp_kv *kv, kvp_placement *placement);

/* New rows of a tensor, row i at `at` + i * stride. */
typedef struct kvp_rows {
    kvp_kv *kv;
    const float *at;
    size_t stride;
    const int32_t *positions; /* of keys (rope.h); NULL: as they are stored */
} kvp_rows;

/* New rows for the cells. Those that are refused become invalid cells, which is no error. Rows are
 * of one tensor, or of the keys and the values of a layer, which have equal cells and one placement
 * or none. Where a mask has to say where they go they wait for kvp_kv_flush, which every other
 * function here does without a mask when it must. */
kvant_status kvp_kv_enter(const kvp_rows *rows, size_t n_tensors, const int64_t *cells, size_t n,
                          uint32_t n_threads);
kvant_status kvp_kv_flush(kvp_kv *kv, const kvp_mask *mask, uint32_t n_threads);

/* Drops what waits. */
void kvp_kv_forget_waiting(kvp_kv *kv);

/* How many pages tokens take that begin a page. */
static inline uint32_t kvp_pages_of(uint32_t tokens)
{
    return (tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
}

/* The slot of a cell, numbered over all streams: streams begin with a block of their own. -1 when a
 * placement has none for it, which means that it was never written. */
static inline int64_t kvp_kv_slot(const kvp_kv *kv, int64_t cell)
{
    if (kv->placement != NULL)
        return kvp_placement_slot(kv->placement, (uint32_t)cell);
    int64_t n = kv->shape.n_cells,
            padded = (n + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;

    return cell / n * padded + cell % n;
}

/* Decodes n cells from the first on. Cells that were never written are zeros, or the centre where
 * there is one; invalid cells are NaN. */
kvant_status kvp_kv_read_rows(const kvp_kv *kv, size_t cell, size_t n, float *rows);

/* Writes at most 512 cells that have a slot. Cells whose rows are refused become invalid. */
kvant_status kvp_kv_write_rows(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows,
                               uint32_t n_threads);

/* Nominal bytes of one stream. */
size_t kvp_kv_stream_bytes(const kvp_kv *kv);

/* Nominal fp16 bytes offset .. offset + size - 1. Partial rows are fine: reading decodes the row
 * and copies a part, writing decodes, replaces and encodes again. A failure to read is printed, and
 * false is returned. llama.cpp does not hear of a failure to write: cells whose rows cannot be
 * stored become invalid (invalid.h), and so do cells of unbound tensors, unless they become zeros.
 */
bool kvp_kv_read(kvp_kv *kv, size_t offset, size_t size, void *out);
void kvp_kv_write(kvp_kv *kv, size_t offset, size_t size, const void *data);
void kvp_kv_fill(kvp_kv *kv, size_t offset, size_t size, uint8_t value);

/* Everything becomes unwritten and its memory goes back to the system; head_dim stays. */
void kvp_kv_clear(kvp_kv *kv);

/* Copies one stream's compressed bytes; false when the two are not alike (copy by rows then). */
bool kvp_kv_copy_stream(const kvp_kv *from, uint32_t from_stream, kvp_kv *to, uint32_t to_stream);

#endif /* KVP_KV_TENSOR_H */
