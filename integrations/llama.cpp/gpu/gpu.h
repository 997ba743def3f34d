/* gpu.h - the devices KVANT0, KVANT1, ... of a llama.cpp with CUDA: the cache compressed in GPU
 * memory.
 *
 * A device is derived from CUDA's: a copy of the struct, with a few functions replaced. All other
 * functions run in ggml-cuda. To llama.cpp it is the same GPU, so nothing is copied between
 * devices, and weights, activations and recurrent state lie in CUDA's buffers. KVANT is a second
 * name of KVANT0, so a program that asks for KVANT gets the cache in GPU memory.
 *
 * Graphs:
 *
 *   devices.c      devices and buffer types: replaced functions, and owners of buffers
 *   backend.c      back ends: graphs cut at our operations, captured as one CUDA graph, replayed
 *   graph.c        the caches that a graph uses, and their preparation before the graph
 *   ops.c          the operations as launches of libkvant_cuda; attention.c launches attention
 *   edges.c        removes needless edges from captured graphs
 *   masks.c        the masks that need not be read
 *   accel.c        attention on llama.cpp's own cache
 *   load.c         a thread that loads kernels
 *
 * Cache tensors:
 *
 *   cells.c        cache tensors in GPU memory: the kvp_remote of kv_tensor.h
 *   matrices.c     their transforms in GPU memory
 *   rows.c         rows of these tensors, read and written without a graph
 *   marks.c        cells whose rows were refused
 *   fetch.c        copies in the computer's memory
 *   size.c         the memory that a cache takes, computed from shapes
 *   in_place.c     caches that fit as fp16
 *   ready.c        prepares the compression of these caches; hand_over.c compresses them
 *   fp16_pages.c   exact pages, whose rows are fp16
 *   seal.c         encodes exact pages
 *   step.c         steps for the plan (src/store/plan.h), which gives exact pages to blocks
 *   groups.c       codecs whose groups have several tokens: blocks are sealed as a whole
 *
 * Transforms:
 *
 *   learn.c        learns centre and scale from first rows
 *   first_matrix.c when a layer's first key transform is made and comes in force (transform=first)
 *   held.c         exact rows that get this key transform
 *   lesson.c       the keys from which it is made
 *   learner.c      the work that makes key transforms
 *   queries.c      queries of prompts, from which key transforms are learned
 *   buckets.c      a key transform for each further position bucket
 *   centers.c      centres of blocks of keys
 *   shift.c        keys that move to other positions; shift_keys.c moves the keys of a layer
 *
 * cache.h has caches and their tensors, transforms.h the transforms that they learn, and types.h
 * has types for both. This header has devices, back ends and graphs.
 *
 * Cells are slots. llama.cpp's own cell numbers, in GPU memory, say to the kernels where rows go,
 * and its mask says which cells a token sees. So no argument of a launch depends on the host, and a
 * launch can be replayed.
 *
 * The following is refused, each with a line: feedback, kmeans, kv heads with different specs, keys
 * and values with different head_dims, and a key transform with groups of several tokens.
 * Everything that kvant/cuda.h refuses is refused as well, except dense rotations. Centre and scale
 * of first rows (center=first, norm=first) are learned once: from the first 64 tokens, or from the
 * batch with them, after the cache was created or cleared. A layer also learns its first key
 * transform once (transform=first), and rows that were sealed before have none. Positions from 2048
 * on have further key transforms. Each block of keys with a key transform has its own centre. With
 * a softcap keys have no centre. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include <kvant/cuda_kernels.h>
#include <kvant/tensor_hooks.h>

#include "../abi.h"
#include "../kv_tensor.h"
#include "../ops.h"
#include "cache.h"
#include "driver.h"

#define KVP_MAX_GPUS 17 /* 16 GPUs, and the first of them a second time */

/* The numbers (cells or positions) that llama.cpp wrote to an input on the GPU, found by the
 * address of the input. */
typedef struct kvp_gpu_input_copy {
    struct kvp_gpu_input_copy *next;
    const void *at;
    void *copy;
    size_t bytes;
} kvp_gpu_input_copy;

#define KVP_MOST_STREAMS 256 /* LLAMA_MAX_SEQ of llama.cpp */
#define KVP_MOST_MASKS 8     /* of a graph: models have one for each kind of layer */

/* The places for copies of tensors in the computer's memory. */
typedef enum kvp_fetched { KVP_FETCHED_KEYS, KVP_FETCHED_VALUES, KVP_N_FETCHED } kvp_fetched;
/* Host memory that the GPU copies to fast. */
struct kvp_gpu_fetched {
    void *at;
    size_t bytes;
};

/* A mask as llama.cpp sent it to the GPU. With `plain`, query row i of stream s sees cells 0 to
 * lengths[s] - n_rows + i and no other, and attention has not taken the lengths yet. With `known`,
 * the mask says which blocks rows see, until the graph is prepared: by lengths if in_order is set,
 * else by bits. */
typedef struct kvp_gpu_mask {
    struct kvp_gpu_mask *next;
    const void *at;
    size_t n_cells, n_rows, n_streams;
    bool plain, known, in_order;
    int32_t lengths[KVP_MOST_STREAMS];
    uint64_t *bits; /* by row: one bit per block of 64 cells of the row's stream */
    size_t most_bits;
} kvp_gpu_mask;

struct kvp_gpu {
    /* has to be first: a pointer to the device is a pointer to this struct */
    abi_device device;
    /* the type of all buffers; the label of buffers that hold cache tensors */
    abi_any_buft buft, kv_buft;
    abi_device *inner; /* CUDA's */
    abi_buft *inner_buft;
    char name[16];
    cu_context context;
    /* The stream of all of the plug-in's kernels. With kernels on further streams every launch
     * takes longer (docs/internals/cuda.md). */
    cu_stream stream;
    kvp_remote remote;
    /* recursive; held while work is enqueued on the stream, and while a graph is captured there */
    pthread_mutex_t lock;
    kvp_gpu_backend *backends; /* live back ends; under list_lock */
    atomic_uint epoch;         /* when it changes, captured graphs must not be used any more */
    kvp_gpu_cache *caches;     /* under the lock */
    kvp_gpu_input_copy *seen;  /* under the lock */
    bool lost_input;           /* an input of the next graph found no memory; under the lock */
    kvp_gpu_mask *masks;       /* under the lock */
    void (*set_tensor)(abi_buffer *buffer, abi_tensor *tensor, const void *data, size_t offset,
                       size_t size); /* CUDA's function */
    /* numbers: 0, 1, 2, ... for kernels that read arrays of cells, blocks or lengths; batch: rows
     * that are uploaded or downloaded, under the lock; staging: the staging pages of groups.c,
     * under the lock */
    kvp_gpu_memory numbers, batch, staging;
    struct kvp_gpu_piece *pieces; /* memory for these copies that no thread uses; under list_lock */
    /* say whether rows were refused: rows of `batch`, while the lock is held, and rows of
     * hand-overs, which end while other contexts may use `batch` */
    atomic_uint *refused, *refused_later;
    /* says whether rows of exact pages could not be encoded, because a codec stores their length as
     * fp16 */
    atomic_uint *unsealed;
    /* a cache has memory that a hand-over or learning needed, or rows of a hand-over that may have
     * been refused */
    atomic_bool hands_over;
    pthread_mutex_t list_lock;
};

/* How a graph uses one cache, for in_place.c. */
typedef struct kvp_gpu_use {
    kvp_gpu_cache *cache;
    const abi_tensor *cells, *mask;
    size_t n_kv;           /* n_kv of its attention; 0: it has no attention */
    size_t n_query_tokens; /* query tokens of its attention */
    bool shifts;           /* the graph moves keys */
    bool other;            /* the graph has another operation, which needs pages */
} kvp_gpu_use;

struct kvp_gpu_backend {
    kvp_gpu *gpu;
    abi_backend *backend; /* CUDA's back end, created for this one */
    abi_backend_iface inner;
    kvp_gpu_backend *next;
    cu_event to_us, to_cuda;
    abi_event to_us_event, to_cuda_event;
    bool on_ours; /* the last work was enqueued on our stream, not on CUDA's */
    /* attention was launched since our stream last waited for CUDA's */
    bool attended_since;
    kvp_gpu_memory workspace, queries, centered,
        /* centered: rows minus their blocks' centres; offsets: products of queries and these
         * centres */
        offsets;
    struct kvp_gpu_scratch { /* for the current attention node */
        void *at;
        size_t bytes;
        float *offsets; /* products of queries and centres, for keys whose centres rotate */
        float *queries; /* transformed queries */
        size_t query_bytes;
        bool used_before; /* by other nodes, so its counters are not zero */
    } scratch;
    kvp_compute compute; /* for the operation that the CPU computes: the context shift */
    /* A node that computes nothing and changes before each graph. It keeps ggml-cuda from capturing
     * a graph within our capture. */
    abi_tensor front;
    abi_tensor **nodes; /* the front node, and behind it the nodes of a part of a graph */
    uint64_t *part_uids;
    int n_nodes, n_part_uids;
    uint64_t uid; /* uid of the graph that was computed last */
    /* The uses of the graph that was looked at last; llama.cpp computes most graphs again. */
    struct kvp_gpu_uses {
        uint64_t uid; /* uid of that graph; 0: none */
        int n;
        kvp_gpu_use of[KVANT_CUDA_MOST_SPREAD];
        /* whether the graph has nodes of ours, while the caches had these forms */
        uint64_t ours_uid;
        unsigned ours_forms;
        bool ours;
    } uses;
    /* the caches that the graph writes to, and the addresses of their cell numbers */
    struct kvp_gpu_writes {
        kvp_gpu_cache *cache;
        const abi_tensor *cells, *last; /* last: the last attention node over the cache */
    } writes[KVANT_CUDA_MOST_SPREAD];
    int n_writes;
    const void *positions;    /* address of the tokens' positions; NULL: unknown */
    bool warned;              /* the user was told that caches need positions */
    struct kvp_gpu_attended { /* the attention nodes of one mask; plain: the mask is not read */
        const void *mask;
        size_t n_cells, n_rows, n_streams;
        bool plain;
    } attended[KVP_MOST_MASKS];
    int n_attended;
    kvp_gpu_memory lengths; /* for each of these masks, the lengths of its streams */
    /* since a graph was captured, some mask became plain or ceased to be plain */
    bool masks_changed;
    /* when the graph was captured, all of its rows went to exact pages only */
    bool all_pending;
    unsigned forms,
        /* forms of the caches of the current graph, and of the graph that was looked at */
        looked_forms;
    /* the cache in place that learns from queries of the current batch; NULL: none */
    kvp_gpu_cache *query_cache;
    unsigned epoch; /* the GPU's epoch when the graph was captured */
    /* a word in the computer's memory in which kernels say that they did not store some rows */
    atomic_uint *refused;
    struct kvp_layers *layers; /* the layers of the llama context that created this back end */
    const void *context;       /* the id of the layers' caches to which its graphs attend */
    struct kvp_gpu_fetched fetched[KVP_N_FETCHED];
    bool looked,
        /* looked: the batch's tokens were examined; monotonous: they are too much alike to learn a
         * transform from */
        monotonous;
    const abi_graph *graph; /* the current graph */
    /* the keys whose rows were stored last, together with their values, if all of these rows went
     * to exact pages; or NULL */
    const kvp_gpu_cells *kept_exact;
    cu_graph_exec exec;
    bool graphs, captured; /* graphs: capturing is allowed; captured: exec is valid */
    unsigned long n_graphs, n_parts, n_captures, n_launches;
};

/* devices.c. Creates the devices of every GPU that CUDA's registry has and returns their number. 0
 * with a line in err, which is empty when there is no CUDA. */
size_t kvp_gpu_setup(abi_reg *reg, char *err, size_t errlen);
abi_device *kvp_gpu_device(size_t index);
abi_reg *kvp_gpu_inner_reg(void);

static inline kvp_gpu *kvp_gpu_of(abi_device *device)
{
    return (kvp_gpu *)device;
}

/* Makes the GPU current for this thread. */
bool kvp_gpu_enter(const kvp_gpu *gpu);

/* Grows the memory to at least `bytes`, zeroed if zero is set; false with a message. Earlier
 * contents are lost. */
bool kvp_gpu_grow(kvp_gpu *gpu, kvp_gpu_memory *memory, size_t bytes, bool zero);
void kvp_gpu_release(kvp_gpu_memory *memory);

/* Frees former sizes. No work and no captured graph may use them any more. */
void kvp_gpu_release_former(kvp_gpu_memory *memory);

/* Bytes that kvp_gpu_grow holds on all GPUs. */
size_t kvp_gpu_held(void);

/* Waits for our stream, and for the back ends whose graphs had attention on caches of this context
 * (backend.c). Other back ends may be at work in their own threads: ggml-cuda may be capturing a
 * graph there, and a wait would end the capture. NULL: waits for no back ends. */
void kvp_gpu_finish(kvp_gpu *gpu, const void *context);

/* Frees the memory for copies, with the last back end. The lock is held. */
void kvp_gpu_copying_release(kvp_gpu *gpu);
void kvp_gpu_fetch_release(kvp_gpu_backend *b);

/* Copies n rows of `width` bytes, which lie one after another on the GPU, and `pitch` bytes apart
 * in the computer's memory. Waits for our stream. False with a message. */
bool kvp_gpu_copy_out_rows(kvp_gpu *gpu, void *to, size_t pitch, const void *from, size_t width,
                           size_t n);
bool kvp_gpu_copy_in_rows(kvp_gpu *gpu, void *to, const void *from, size_t pitch, size_t width,
                          size_t n);

/* Copies a tensor to the computer's memory. The copy stays until the next copy to this place. False
 * without memory. Waits for the stream. */
bool kvp_gpu_fetch(kvp_gpu_backend *b, kvp_fetched place, const abi_tensor *from, abi_tensor *to);

/* devices.c. `kvp_gpu_find_step` finds the batch whose cell numbers lie at this address of the GPU;
 * false when they were not seen. positions: the address of the batch's positions, or NULL.
 * `kvp_gpu_forget_inputs` forgets all inputs, when no graph is computed any more. */
bool kvp_gpu_find_step(kvp_gpu *gpu, const void *cells, const void *positions, size_t n,
                       kvp_gpu_step *step);
const int32_t *kvp_gpu_positions_at(const kvp_gpu *gpu, const void *at, size_t n); /* or NULL */
void kvp_gpu_forget_inputs(kvp_gpu *gpu);

/* masks.c. Reads a mask that llama.cpp is sending to the GPU. The lock is held. */
void kvp_gpu_note_mask(kvp_gpu *gpu, const abi_tensor *tensor, const void *data, size_t size);

/* `kvp_gpu_mask_of` returns the mask of an attention node over a step of n rows, or NULL if it did
 * not pass the device. `kvp_gpu_mask_sees` says whether a row of the step sees cells of a block;
 * blocks count from the first block of the row's stream. `kvp_gpu_forget_masks` forgets the masks
 * of the graph that was prepared. The lock is held. */
const kvp_gpu_mask *kvp_gpu_mask_of(const kvp_gpu *gpu, const abi_tensor *node, size_t n);
bool kvp_gpu_mask_sees(const kvp_gpu_mask *mask, size_t row, size_t block);
void kvp_gpu_forget_masks(kvp_gpu_backend *b);

/* Adds an attention node to the list of nodes with its mask. False: there are too many masks or
 * streams. */
bool kvp_gpu_find_attended(kvp_gpu_backend *b, const abi_tensor *node);
int kvp_gpu_attended_of(const kvp_gpu_backend *b, const abi_tensor *node);

/* Called before a graph: finds which masks are plain, and brings the number of cells of each stream
 * to the GPU. */
bool kvp_gpu_prepare_attended(kvp_gpu_backend *b);
int32_t *kvp_gpu_lengths(const kvp_gpu_backend *b, int attended);

/* ops.c. CUDA must not get a node that touches cache tensors, not even if it is not supported. */
bool kvp_gpu_supports(kvp_gpu *gpu, const abi_tensor *node);

/* Whether the node's work for a few tokens can be captured. The context shift cannot. */
bool kvp_gpu_capturable(const abi_tensor *node);

/* Whether a and b are SET_ROWS of keys and of values of the same tokens. */
bool kvp_gpu_pairs(const abi_tensor *a, const abi_tensor *b);

/* The cache that a SET_ROWS node of keys writes to; NULL for other nodes and tensors. */
kvp_gpu_cache *kvp_gpu_prepared(const abi_tensor *node);

/* Whether attention sees the rows of a pair of SET_ROWS nodes, one row per stream. */
bool kvp_gpu_attends(const abi_tensor *keys, const abi_tensor *values, const abi_tensor *attending);

/* attention.c. `kvp_gpu_attention` computes an attention node. new_cells: the cells of the newest
 * rows, one per stream, or NULL. transformed: the queries have already been transformed together
 * with their tokens' rows. The function `kvp_gpu_queries_of_pair` prepares this. That function
 * leaves queries->q NULL when queries need no transform or are transformed separately. False
 * without memory. */
int32_t kvp_gpu_attention(kvp_gpu_backend *b, abi_tensor *node, const int64_t *new_cells,
                          bool transformed);
bool kvp_gpu_queries_of_pair(kvp_gpu_backend *b, const abi_tensor *node,
                             kvant_cuda_kernel_query_args *queries);

/* Enqueues a node on the back end's stream. values: the second node of a pair, or NULL. attending:
 * the attention node that is computed with the pair, or NULL. */
int32_t kvp_gpu_compute(kvp_gpu_backend *b, abi_tensor *node, abi_tensor *values,
                        abi_tensor *attending);

/* attention.c. Bytes behind an attention node's output, for unpacked pages, transformed queries and
 * their products with centres when there are many query rows. They are part of the node's size, so
 * --fit counts them. */
size_t kvp_gpu_room(kvp_gpu *gpu, const abi_tensor *node);

/* accel.c. llama.cpp keeps its own cache, and the plug-in computes the attention nodes over it for
 * which kvp_gpu_accelerates returns true. */
void kvp_gpu_set_accel(bool on);
bool kvp_gpu_accel(void);
bool kvp_gpu_accelerates(const abi_tensor *node);
int32_t kvp_gpu_accelerate(kvp_gpu_backend *b, const abi_tensor *node);

/* edges.c. Removes needless edges from a captured graph. False: the graph must not be used. */
bool kvp_gpu_straighten(cu_graph graph);

/* backend.c. Makes all work that is enqueued on our stream from now on wait for CUDA's work so
 * far. */
void kvp_gpu_follow(kvp_gpu_backend *b);

/* Whether libkvant_cuda computes a node. */
bool kvp_gpu_is_ours(const abi_tensor *node);

/* graph.c. `kvp_gpu_find_positions` finds the address of the positions of a graph's tokens.
 * `kvp_gpu_look_at` finds the caches that the graph writes to, and its masks; false with a message
 * when there are more than the device can handle. `kvp_gpu_prepare` runs before the graph that was
 * looked at, and opens blocks for the rows of its batch. *waits: all rows go to exact pages
 * only. */
void kvp_gpu_find_positions(kvp_gpu_backend *b, const abi_graph *graph);
bool kvp_gpu_look_at(kvp_gpu_backend *b, const abi_graph *graph);
bool kvp_gpu_prepare(kvp_gpu_backend *b, bool *waits);

abi_backend *kvp_gpu_init_backend(abi_device *device, const char *params);
