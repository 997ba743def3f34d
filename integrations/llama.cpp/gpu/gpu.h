/* gpu.h - the devices KVANT0, KVANT1, ... of a llama.cpp with CUDA: the cache compressed in GPU
 * memory.
 *
 * A device is derived from CUDA's: a copy of the struct, with a few functions replaced. What is not
 * replaced runs in ggml-cuda. llama.cpp sees one GPU, so nothing is copied between devices, and
 * weights, activations and recurrent state are CUDA's. KVANT is KVANT0 by another name, so that
 * what asks for KVANT gets the cache in GPU memory.
 *
 *   devices.c   devices and buffer types: what is replaced, and whose memory a buffer is
 *   backend.c   back ends: graphs cut at our operations, captured as one CUDA graph, replayed
 *   graph.c     which caches a graph uses, and what these need before it
 *   ops.c       the operations as launches of libkvant_cuda
 *   attention.c attention among them
 *   edges.c     captured graphs in one line
 *   marks.c     cells whose rows were refused
 *   masks.c     which masks need not be read
 *   cells.c     cache tensors in GPU memory: the kvp_remote of kv_tensor.h
 *   rows.c      their rows, read and written without a graph
 *   learn.c     centre and scale of their first rows
 *   first.c     a layer's first matrix (transform=first): when it is made and comes in force
 *   learner.c   the threads that make matrices
 *   queries.c   queries of prompts, which matrices are made from
 *   ranges.c    further matrices, for rows at later positions
 *   shift.c     keys that move to other positions; shift_keys.c those of a layer
 *   centers.c   centres of blocks
 *   fetch.c     copies in the computer's memory
 *   accel.c     attention on llama.cpp's own cache
 *   size.c      what all of this takes, from shapes alone
 *   in_place.c  caches that fit as fp16; ready.c before they no longer do, hand_over.c then
 *   open.c      blocks whose rows are fp16
 *   step.c      steps for the plan (src/store/plan.h), which decides which blocks these are
 *
 * cache.h has caches and their tensors, transforms.h what they learn, and types.h what both need.
 * This header has devices, back ends and graphs.
 *
 * Cells are slots: llama.cpp's own cell numbers, in GPU memory, tell the kernels where rows go, and
 * its mask tells attention what a token sees. So a launch depends on nothing that the host would
 * have to know, and can be replayed.
 *
 * Refused, each with a line: codecs of groups of tokens, feedback, kmeans, kv heads with different
 * specs, head_dim of keys and values that differ, and what kvant/cuda.h refuses, except dense
 * rotations. Centre and scale of first rows (center=first, norm=first) have one version here: that
 * of the first 64 tokens, or of the batch with them, after the cache was created or cleared. A
 * layer has one first matrix, too (transform=first): rows that were sealed before it have none.
 * Positions from 2048 on have further matrices. Blocks of keys with a matrix have centres of their
 * own. With a softcap keys have none. */
#ifndef KVP_CUDA_GPU_H
#define KVP_CUDA_GPU_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include <kvant/cuda_kernels.h>
#include <kvant/tensor_hooks.h>

#include "../abi.h"
#include "../kv_tensor.h"
#include "../ops.h"
#include "cache.h"
#include "driver.h"

#define KVP_MAX_GPUS 17 /* 16, and one of them again */

/* What llama.cpp wrote to an input of numbers: cells and positions, by where they lie on the GPU.
 * */
typedef struct kvp_gpu_seen {
    struct kvp_gpu_seen *next;
    const void *at;
    void *copy;
    size_t bytes;
} kvp_gpu_seen;

#define KVP_MOST_STREAMS 256
#define KVP_MOST_MASKS 8

/* Where copies of tensors are in the computer's memory. */
typedef enum kvp_fetched { KVP_FETCHED_KEYS, KVP_FETCHED_VALUES, KVP_FETCHED_PLACES } kvp_fetched;
/* Memory that copies are fast to. */
struct kvp_gpu_fetched {
    void *at;
    size_t bytes;
};

/* A mask as llama.cpp sent it to the GPU. plain: query row i of stream s sees cells 0 to lengths[s]
 * - n_rows + i and no other; attention did not take the lengths yet. known: until the graph is
 * prepared, the mask says which blocks rows see, by lengths if in_order is set, else by bits. */
typedef struct kvp_gpu_mask {
    struct kvp_gpu_mask *next;
    const void *at;
    size_t n_cells, n_rows, n_streams;
    bool plain, known, in_order;
    int32_t lengths[KVP_MOST_STREAMS];
    uint64_t *bits; /* by row: a bit per block of 64 cells of the row's stream */
    size_t most_bits;
} kvp_gpu_mask;

struct kvp_gpu {
    abi_device device;          /* first: a pointer to one is a pointer to the other */
    abi_any_buft buft, kv_buft; /* of everything; the label of buffers that hold cache tensors */
    abi_device *inner;          /* CUDA's */
    abi_buft *inner_buft;
    char name[16];
    cu_context context;
    /* of all that is ours: with kernels of further streams every launch takes longer
     * (docs/internals/cuda.md) */
    cu_stream stream;
    kvp_remote remote;
    /* recursive; held while work is enqueued on the stream, and while a graph is captured there */
    pthread_mutex_t lock;
    kvp_gpu_backend *backends; /* alive; under list_lock */
    atomic_uint epoch;         /* another one: captured graphs are of the past */
    /* Cell i is i, block i is i, and a length of i is i, for kernels that read arrays. */
    kvp_gpu_cache *caches; /* under the lock */
    kvp_gpu_seen *seen;    /* under the lock */
    kvp_gpu_mask *masks;   /* under the lock */
    void (*set_tensor)(abi_buffer *buffer, abi_tensor *tensor, const void *data, size_t offset,
                       size_t size); /* CUDA's */
    kvp_gpu_memory numbers, batch;   /* batch: rows on their way; under the lock */
    cu_stream copying;               /* of copies to the computer's memory, while kernels go on */
    atomic_uint *refused;            /* of these rows */
    atomic_bool hands_over; /* a cache has memory for that, and rows that may have been refused */
    pthread_mutex_t list_lock;
};

/* What a graph does with one cache, for in_place.c. */
typedef struct kvp_gpu_use {
    kvp_gpu_cache *cache;
    const abi_tensor *cells, *mask;
    size_t n_kv;  /* of its attention; 0: it has none */
    size_t asked; /* tokens of its attention */
    bool shifts;  /* keys move */
    bool other;   /* an operation that needs pages */
} kvp_gpu_use;

struct kvp_gpu_backend {
    kvp_gpu *gpu;
    abi_backend *backend; /* CUDA's, made for us */
    abi_backend_iface inner;
    kvp_gpu_backend *next;
    cu_event to_us, to_cuda;
    abi_event to_us_event, to_cuda_event;
    bool on_ours; /* what was enqueued last is on our stream */
    kvp_gpu_memory workspace, queries, centered,
        offsets; /* the latter: rows about their blocks' centres, and what queries get of these */
    struct kvp_gpu_scratch { /* of the attention node at hand */
        void *at;
        size_t bytes;
        float *offsets; /* of keys that turn */
    } scratch;
    kvp_compute compute; /* for what the CPU computes: the context shift */
    /* computes nothing and is never the same: keeps ggml-cuda from a capture of its own */
    abi_tensor front;
    abi_tensor **nodes; /* of a part of a graph, behind the front */
    uint64_t *part_uids;
    int n_nodes, n_part_uids;
    uint64_t uid;         /* of the graph that was computed last */
    struct kvp_gpu_uses { /* of the graph that was looked at last: llama.cpp computes most again */
        uint64_t uid;     /* 0: none */
        int n;
        kvp_gpu_use of[KVANT_CUDA_MOST_SPREAD];
        uint64_t ours_uid; /* whether it has nodes of ours, while caches had these forms */
        unsigned ours_forms;
        bool ours;
    } uses;
    struct kvp_gpu_writes { /* caches that it writes to, and where the cell numbers lie */
        kvp_gpu_cache *cache;
        const abi_tensor *cells, *last; /* last: attention node over the cache */
    } writes[KVANT_CUDA_MOST_SPREAD];
    int n_writes;
    const void *positions;    /* the place of the tokens' positions; NULL: unknown */
    bool warned;              /* that caches need them */
    struct kvp_gpu_attended { /* attention nodes of one mask; plain: it is not read */
        const void *mask;
        size_t n_cells, n_rows, n_streams;
        bool plain;
    } attended[KVP_MOST_MASKS];
    int n_attended;
    kvp_gpu_memory lengths; /* of the streams of each of these */
    bool masks_changed;     /* one became plain, or ceased to be, since a graph was captured */
    bool waits;             /* all of its rows went to open pages when it was captured */
    unsigned forms,
        looked_forms; /* of the caches of the graph at hand; and of the one that was looked at */
    kvp_gpu_cache
        *asking;    /* which is in place and learns from queries of the batch at hand; NULL: none */
    unsigned epoch; /* when it was captured */
    atomic_uint
        *refused; /* kernels say here, in the computer's memory, which rows they did not store */
    struct kvp_layers *layers; /* of the llama context that made it */
    const void *context;       /* whose caches its graphs attend to: the layers of these caches */
    struct kvp_gpu_fetched fetched[KVP_FETCHED_PLACES];
    bool looked,
        monotonous; /* at the tokens of the batch; they are too much alike to learn a matrix from */
    const abi_graph *graph; /* at hand */
    cu_graph_exec exec;
    bool graphs, captured; /* graphs: may be captured */
    unsigned long n_graphs, n_parts, n_captures, n_launches;
};

/* devices.c: the devices of every GPU that CUDA's registry has; how many, 0 with a line in err
 * (empty: no CUDA here). */
size_t kvp_gpu_setup(abi_reg *reg, char *err, size_t errlen);
abi_device *kvp_gpu_device(size_t index);
abi_reg *kvp_gpu_inner_reg(void);

static inline kvp_gpu *kvp_gpu_of(abi_device *device)
{
    return (kvp_gpu *)device;
}

/* Makes the GPU current for this thread. */
bool kvp_gpu_enter(const kvp_gpu *gpu);

/* Makes the memory at least this large, zeroed if zero is set; false with a message. */
bool kvp_gpu_grow(kvp_gpu *gpu, kvp_gpu_memory *memory, size_t bytes, bool zero);
void kvp_gpu_release(kvp_gpu_memory *memory);

/* Gives former sizes back, when no work that uses them is left and no captured graph. */
void kvp_gpu_release_former(kvp_gpu_memory *memory);

/* Bytes that kvp_gpu_grow holds on all GPUs. */
size_t kvp_gpu_held(void);

/* Waits for our stream, and for the back ends whose graphs had attention on caches of this context
 * (backend.c). Others may be at work in their own threads: ggml-cuda may be capturing a graph
 * there, which a wait would end. NULL: no back ends. */
void kvp_gpu_finish(kvp_gpu *gpu, const void *context);

/* The stream of copies that threads make. release: the last back end goes; waits for the threads.
 * The lock is held. */
bool kvp_gpu_have_copying(kvp_gpu *gpu);
void kvp_gpu_copying_release(kvp_gpu *gpu);
void kvp_gpu_fetch_release(kvp_gpu_backend *b);

/* A copy in the computer's memory, which stays until the next one of this place; false without
 * memory. Waits for the stream. */
bool kvp_gpu_fetch(kvp_gpu_backend *b, kvp_fetched place, const abi_tensor *from, abi_tensor *to);

/* devices.c: the batch whose cell numbers lie at this address of the GPU; false: they were not
 * seen. positions: where those of the batch lie, or NULL. forget: when nobody computes any more. */
bool kvp_gpu_find_step(kvp_gpu *gpu, const void *cells, const void *positions, size_t n,
                       kvp_gpu_step *step);
const int32_t *kvp_gpu_positions_at(const kvp_gpu *gpu, const void *at, size_t n); /* or NULL */
void kvp_gpu_forget_inputs(kvp_gpu *gpu);

/* masks.c. A mask on its way to the GPU; the lock is held. */
void kvp_gpu_note_mask(kvp_gpu *gpu, const abi_tensor *tensor, const void *data, size_t size);

/* kvp_gpu_mask_of returns the mask of an attention node over a step of n rows, or NULL if it did
 * not pass the device. kvp_gpu_mask_sees tells whether a row of the step sees cells of a block.
 * Blocks count from the first one of the row's stream. kvp_gpu_forget_masks forgets the masks of
 * the graph that was prepared. The lock is held. */
const kvp_gpu_mask *kvp_gpu_mask_of(const kvp_gpu *gpu, const abi_tensor *node, size_t n);
bool kvp_gpu_mask_sees(const kvp_gpu_mask *mask, size_t row, size_t block);
void kvp_gpu_forget_masks(kvp_gpu_backend *b);

/* Adds an attention node to those of its mask; false: there are too many masks or streams. */
bool kvp_gpu_find_attended(kvp_gpu_backend *b, const abi_tensor *node);
int kvp_gpu_attended_of(const kvp_gpu_backend *b, const abi_tensor *node);

/* Before a graph: which masks are plain, and how many cells each stream has, on the GPU. */
bool kvp_gpu_prepare_attended(kvp_gpu_backend *b);
const int32_t *kvp_gpu_lengths(const kvp_gpu_backend *b, int attended);

/* ops.c: whether a node is ours, and what to do for it. A node that touches cache tensors and is
 * not supported must not be given to CUDA. */
bool kvp_gpu_touches(const abi_tensor *node);

/* The cache tensor that a node writes to or reads; NULL: none. */
const abi_tensor *kvp_gpu_touched(const abi_tensor *node);
bool kvp_gpu_supports(kvp_gpu *gpu, const abi_tensor *node);

/* Whether what the node does for a few tokens can be captured; the context shift cannot. */
bool kvp_gpu_capturable(const abi_tensor *node);

/* Whether a is SET_ROWS of keys and b that of the values of the same tokens. */
bool kvp_gpu_pairs(const abi_tensor *a, const abi_tensor *b);

/* The cache that a SET_ROWS node of keys writes to; NULL: none, or the node is another one. */
kvp_gpu_cache *kvp_gpu_prepared(const abi_tensor *node);

/* Whether attention sees the rows of a pair, one per stream. */
bool kvp_gpu_attends(const abi_tensor *keys, const abi_tensor *values, const abi_tensor *attending);

/* attention.c. new_cells: NULL, or those of the newest rows, one per stream. transformed: queries
 * went through their matrix with the rows of their tokens, by what queries_of_pair said; q NULL:
 * they need none, or go by themselves. False without memory. */
int32_t kvp_gpu_attention(kvp_gpu_backend *b, abi_tensor *node, const int64_t *new_cells,
                          bool transformed);
bool kvp_gpu_queries_of_pair(kvp_gpu_backend *b, const abi_tensor *node,
                             kvant_cuda_kernel_query_args *queries);

/* Enqueues the node on the back end's stream; values: NULL, or the second of a pair; attending:
 * NULL, or the attention that comes with a pair. */
int32_t kvp_gpu_compute(kvp_gpu_backend *b, abi_tensor *node, abi_tensor *values,
                        abi_tensor *attending);

/* attention.c. Bytes that an attention node's output has behind it, for unpacked pages of many
 * query rows and for what these get of centres: so --fit counts them. */
size_t kvp_gpu_room(kvp_gpu *gpu, const abi_tensor *node);

/* accel.c: llama.cpp's own cache stays, and attention nodes over it are ours where
 * kvp_gpu_accelerates says so. */
void kvp_gpu_set_accel(bool on);
bool kvp_gpu_accel(void);
bool kvp_gpu_accelerates(const abi_tensor *node);
int32_t kvp_gpu_accelerate(kvp_gpu_backend *b, const abi_tensor *node);

/* edges.c: takes edges out of a captured graph that order nothing; false: the graph must not be
 * used. */
bool kvp_gpu_straighten(cu_graph graph);

/* backend.c. follow: what is enqueued on our stream from now on comes after CUDA's work. */
void kvp_gpu_follow(kvp_gpu_backend *b);

/* Whether libkvant_cuda computes a node. */
bool kvp_gpu_is_ours(const abi_tensor *node);

/* graph.c. find_positions: where those of the graph's tokens lie. look_at: which caches it writes
 * to, and its masks; false with a message where that is more than the device knows. prepare: before
 * the graph that was looked at, opens blocks for the rows of its batch; *waits: all of them go to
 * open pages. */
void kvp_gpu_find_positions(kvp_gpu_backend *b, const abi_graph *graph);
bool kvp_gpu_look_at(kvp_gpu_backend *b, const abi_graph *graph);
bool kvp_gpu_prepare(kvp_gpu_backend *b, bool *waits);

/* Whether a node of a graph is computed: views are not, nor what llama.cpp left out. */
bool kvp_gpu_is_computed(const abi_tensor *node);
abi_backend *kvp_gpu_init_backend(abi_device *device, const char *params);

#endif /* KVP_CUDA_GPU_H */
