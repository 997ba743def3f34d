/* gpu.h - the devices KVANT0, KVANT1, ... of a llama.cpp with CUDA: the cache compressed in GPU memory.
 *
 * A device is derived from CUDA's: a copy of the struct, with a few functions replaced. What is not replaced runs in
 * ggml-cuda. llama.cpp sees one GPU, so nothing is copied between devices, and weights, activations and recurrent state
 * are CUDA's.
 * KVANT is KVANT0 by another name, so that what asks for KVANT gets the cache in GPU memory.
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
 *   weigh.c     matrices of their first rows and queries (transform=first)
 *   decoded.c   the same from tokens that are decoded
 *   learner.c   what these are learnt with, in threads
 *   ranges.c    further matrices, for rows at later positions
 *   shift.c     keys that move to other positions; shift_keys.c those of a layer
 *   centers.c   centres of blocks
 *   anew.c      rows that take another matrix
 *   wait.c      keys of first batches, which wait for their matrix
 *   fetch.c     copies in the computer's memory
 *   accel.c     attention on llama.cpp's own cache
 *   size.c      what all of this takes, from shapes alone
 *   in_place.c  caches that fit as fp16; ready.c before they no longer do, hand_over.c then
 *   open.c      blocks whose rows are fp16
 *   step.c      steps for the plan (src/store/plan.h), which decides which blocks these are
 *   borrow.c    pages for a batch that waits
 *
 * Cells are slots: llama.cpp's own cell numbers, in GPU memory, tell the kernels where rows go, and its mask tells
 * attention what a token sees. So a launch depends on nothing that the host would have to know, and can be replayed.
 *
 * Refused, each with a line: codecs of groups of tokens, feedback, kmeans, kv heads with different specs, head_dim of
 * keys and values that differ, and what kvant/cuda.h refuses, except dense rotations.
 * Centre and scale of first rows (center=first, norm=first) have one version here: that of the first 64 tokens, or of the
 * batch with them, after the cache was created or cleared. So has a matrix (transform=first): when a better one comes, rows take it.
 * Positions from 2048 on have further matrices. Blocks of keys with a matrix have centres of their own. With a softcap keys have none. */
#ifndef KVP_CUDA_GPU_H
#define KVP_CUDA_GPU_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include <kvant/cuda.h>

#include "../abi.h"
#include "../../../src/store/plan.h"
#include "../kv_tensor.h"
#include "../ops.h"
#include "driver.h"

#define KVP_MAX_GPUS 17 /* 16, and one of them again */

/* Memory that grows; what it held is lost, and what captured graphs use stays until the owner goes. */
typedef struct kvp_gpu_memory {
    void *at;
    size_t bytes;
    struct kvp_gpu_memory *former;
} kvp_gpu_memory;

typedef struct kvp_gpu_backend kvp_gpu_backend;

typedef struct kvp_gpu kvp_gpu;

#define KVP_MOST_PAGES KVP_MOST_OPEN /* more than a batch needs that waits for matrices */
#define KVP_FEW_TOKENS 16u /* a step of at most 16 tokens may be captured */
#define KVP_ENOUGH_ROWS 1024u /* to learn a matrix from */
#define KVP_MOST_WAITING                                                                           \
    (2 * KVP_ENOUGH_ROWS)  /* rows that wait for one, where memory is free (wait.c) */
#define KVP_MOST_ANEW 256u /* blocks that may take another matrix (anew.c) */
#define KVP_MOST_ASKED 16u /* tokens whose queries go with a batch of decoded rows */
#define KVP_LATE_STEPS 32u /* of a few tokens, while threads learn */
#define KVP_KIND_NUMBERS 128u /* of a value, whose signs tell tokens apart */

#define KVP_MOST_RANGES 7u /* of positions; the last one has no end */
#define KVP_MOST_TRANSFORMS KVANT_CUDA_MOST_MATRICES
#define KVP_MOST_MOVED (KVP_MOST_TRANSFORMS - KVP_MOST_RANGES)
#define KVP_FIRST_RANGE 2048u

/* Positions that have a matrix (ranges.c). Rows take it from `from` on. */
typedef struct kvp_gpu_range {
    uint32_t number;
    int32_t first, last, from;
} kvp_gpu_range;

/* Cell numbers and positions of a batch, as llama.cpp sent them to the GPU. positions: or NULL. */
typedef struct kvp_gpu_step {
    const int64_t *cells;
    const int32_t *positions;
    size_t n;
} kvp_gpu_step;

/* What the keys of a block went through has an id. Ids below KVP_MOST_RANGES are the matrices of
 * ranges. The others are of keys that a context shift moved (shift.c): the matrix of a range, and
 * by how many positions these keys moved since they were stored. by 0: the id is free. */
typedef struct kvp_gpu_lineage {
    uint32_t range;
    int32_t by;
} kvp_gpu_lineage;

/* Not a batch: it may be in a captured graph. */
static inline bool kvp_gpu_is_few(const kvp_gpu_step *step)
{
    return step->n <= KVP_FEW_TOKENS;
}

/* The rows of an open page. The plan (src/store/plan.h) decides whose page it is. */
typedef struct kvp_open_page {
    int32_t block;  /* -1: free */
    uint64_t fresh; /* rows that are not encoded yet */
    uint64_t moved; /* rows whose keys moved here: their codes are out of date, values' are not */
    uint64_t few;   /* rows that came in steps of few tokens, since it is this block's */
} kvp_open_page;

/* Rows of a batch one behind the other, in blocks whose keys have one transform. */
typedef struct kvp_gpu_run {
    size_t first, n;
    uint32_t transform; /* its id */
} kvp_gpu_run;

/* By what the centre of a range is turned to be a block's (centers.c, kvant/cuda.h: kvant_cuda_turning). */
typedef struct kvp_gpu_centers {
    int32_t *positions;    /* by block: of its first cell, or KVP_NO_POSITION */
    uint32_t first, end;   /* blocks whose phases the GPU does not have yet */
    bool used;             /* by keys of some layer */
    kvp_gpu_memory phases; /* by block, head_dim each, once they are used */
    kvp_gpu_memory pairs;
    float *host;           /* the same as phases */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope;       /* of the layers whose blocks have centres; size 0: not known */
    uint32_t head_dim;
    bool uneven;           /* others differ: there are no further ranges */
} kvp_gpu_centers;

#define KVP_NO_POSITION INT32_MIN

/* Which blocks' keys have which matrix and centre. */
typedef struct kvp_gpu_ranges {
    uint8_t *of;   /* by block: the id of its transform */
    kvp_gpu_lineage lineages[KVP_MOST_TRANSFORMS]; /* by id */
    bool moved;    /* some of these are of keys that moved */
    uint32_t made; /* a bit for each range that has a matrix; bit 0 always */
    uint32_t asked; /* threads make that of this one; 0: of none */
    size_t since;  /* rows that were stored since */
    bool ended;    /* no others can be had */
    bool changed;  /* of blocks with rows */
    int32_t position; /* the last one of the last step */
    uint8_t used[KVP_MOST_TRANSFORMS]; /* ids of all blocks with rows */
    uint32_t n;             /* of these */
    kvp_gpu_memory numbers; /* by block, for attention: places in `used`, then numbers of centres */
    kvp_gpu_centers centers;
    kvp_gpu_run *runs;     /* of the batch at hand */
    size_t n_runs;
    int64_t *last; /* its cells */
    size_t n_last, most_last;
} kvp_gpu_ranges;

/* Rows of decoded tokens that matrices are learnt from, and queries of some of these tokens (decoded.c). */
typedef struct kvp_gpu_decoded {
    int32_t *positions;   /* by cell, of rows that came in steps of few tokens; NULL: nothing is learnt from them */
    size_t n;             /* the last rows of cache->plain, which no thread saw yet */
    char *signs;          /* of values of different tokens among them */
    size_t n_different;
    uint32_t n_monotonous; /* blocks that were too much so */
    bool ended;           /* nothing is learnt from decoded tokens any more */
    bool asks;            /* graphs of few tokens copy queries: of their first token, from each layer */
    kvp_gpu_memory asked; /* by layer: these, some of steps before, and keys */
    size_t row, pitch, n_layers; /* a token's queries in bytes, and a layer's share, of the layers with the most */
    cu_event ready;       /* rows are there for threads */
    int32_t place;        /* position of those of the last step; -1: it copied none */
    int32_t places[KVP_MOST_ASKED];
    uint32_t n_asked, n_steps;
    bool pends;           /* threads learn, and nobody asks for the result yet */
    uint32_t n_late;      /* steps since they began */
} kvp_gpu_decoded;

/* The tensors of one buffer, whose cells are the same tokens. */
typedef struct kvp_gpu_cache {
    struct kvp_gpu_cache *next;
    const void *id;
    kvp_gpu *gpu;
    kvp_kv **tensors;
    size_t n_tensors;
    bool keeps;           /* open pages; else all rows are encoded at once */
    kvant_exact_part exact; /* the most of what its tensors have */
    uint32_t sink_tokens; /* first tokens of a sequence, which nothing is learnt from */
    uint32_t n_blocks, n_pages, n_own; /* n_own: pages, unless a batch waits for matrices */
    kvant_plan *plan;     /* NULL: no block has a page */
    const kvp_kv *planner; /* whose rows were written first since the last graph; NULL: none were */
    int64_t planned_last;  /* the last cell of these rows */
    int32_t planned_position; /* of the row behind it, counted from where its sequence began */
    int32_t *table; /* by block: itself, or -1 - its open page */
    uint64_t *written; /* by block: a bit per cell that got a row since the cache was cleared */
    kvp_open_page pages[KVP_MOST_PAGES];
    bool table_changed;
    /* The batch at hand: all of its rows are in open pages and in no sealed page yet; some of its
     * rows go to open pages. */
    bool waits, any_open;
    bool learns, learning; /* centre or scale from the first rows; of which too few came yet */
    int64_t *first;       /* their cells */
    size_t n_first;
    bool waiting;         /* keys of the batch at hand do, for the matrix that threads make of them and of later ones */
    kvp_gpu_memory wait;  /* pages in which attention sees the rows meanwhile, these keys, their cells and slots in open pages */
    int64_t *wait_slots;
    int64_t *wait_cells;  /* in the computer's memory; -1: another row is there now. Behind them those of the last step of few tokens */
    size_t n_wait, most_wait, last_wait; /* last: of the last batch, or of that step */
    size_t most_learnt;   /* of these rows */
    size_t n_tensors_wait; /* -sm tensor: others join in the midst of a batch */
    int n_batches;        /* that wait */
    uint32_t n_few;       /* steps of few tokens since: their rows are in these pages, too */
    bool weighs, weighing; /* keys have transform=first; of which some wait for their last matrix */
    uint32_t n_streams;
    kvp_gpu_ranges ranges;
    struct kvp_gpu_plain { /* cells of long batches meanwhile, whose rows are in the computer's memory; -1: another row is there now */
        int64_t *cells;
        int32_t *positions; /* -1: not known */
        size_t n, most, last; /* last: of the last batch */
    } plain;
    kvp_gpu_decoded decoded;
    struct kvp_gpu_shift { /* the last context shift (shift.c) */
        uint32_t n;            /* how many there were */
        const void *input;     /* where positions lie that cells move by */
        struct kvp_gpu_mixed { /* blocks in which not all keys move alike */
            uint32_t block;
            int32_t by[KVANT_PAGE_TOKENS]; /* by cell: beyond what the block moves by */
        } *mixed;
        size_t n_mixed;
    } shift;
    struct kvp_gpu_marks { /* cells whose rows were refused, as the GPU has them (marks.c) */
        kvp_gpu_memory memory;
        uint32_t *host; /* the same as far as the computer knows, and room for as many words */
    } marks;
    bool in_place; /* some tensors are (kvp_gpu_cells), not always all of them */
    struct kvp_gpu_place *place; /* in_place.h; NULL: they never were */
    unsigned forms; /* a larger number: a tensor is in place, or no longer */
    kvp_gpu_memory device_table, slots, moved; /* slots: in open pages, of the batch; moved: numbers of rows that are encoded or decoded */
} kvp_gpu_cache;

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
#define KVP_COPIES 8 /* of layers, whose threads did not read them yet */

/* Memory that copies are fast to. */
struct kvp_gpu_fetched {
    void *at;
    size_t bytes;
};

/* Copies of a layer's keys and queries: on the GPU, and from there in the computer's memory. */
struct kvp_gpu_copies {
    struct kvp_gpu_copy {
        kvp_gpu_memory staged;
        struct kvp_gpu_fetched fetched;
        size_t bytes;
    } keys, queries;
    cu_event staged, copied;
    sem_t free;
};

/* A mask as llama.cpp sent it to the GPU. plain: query row i of stream s sees cells 0 to lengths[s] - n_rows + i and no
 * other; attention did not take the lengths yet. known: until the graph is prepared, the mask says
 * which blocks rows see, by lengths if in_order is set, else by bits. */
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
    cu_stream stream; /* of all that is ours: with kernels of further streams every launch takes longer (docs/internals/cuda.md) */
    kvp_remote remote;
    pthread_mutex_t lock; /* recursive; held while work is enqueued on the stream, and while a graph is captured there */
    kvp_gpu_backend *backends; /* alive; under list_lock */
    atomic_uint epoch;         /* another one: captured graphs are of the past */
    /* Cell i is i, block i is i, and a length of i is i, for kernels that read arrays. */
    kvp_gpu_cache *caches;                          /* under the lock */
    kvp_gpu_seen *seen;                             /* under the lock */
    kvp_gpu_mask *masks;                            /* under the lock */
    void (*set_tensor)(abi_buffer *buffer, abi_tensor *tensor, const void *data, size_t offset, size_t size); /* CUDA's */
    kvp_gpu_memory numbers, batch; /* batch: rows on their way; under the lock */
    cu_stream copying;             /* of copies to the computer's memory, while kernels go on */
    struct kvp_gpu_copies copies[KVP_COPIES]; /* under the lock, as are these two */
    int n_copies;                  /* number of those used last */
    bool copies_taken;             /* by keys, whose queries did not come yet */
    atomic_uint *refused;                 /* of these rows */
    atomic_bool hands_over; /* a cache has memory for that, and rows that may have been refused */
    pthread_mutex_t list_lock;
};

/* One cache tensor; see cells.c. Arrays are in GPU memory, kv head after kv head. */
typedef struct kvp_gpu_cells {
    kvp_gpu *gpu;
    kvant_cuda_codec *codec;
    const kvant_codec *const *sources; /* the scheme's, per kv head; or own */
    kvant_codec **own;                 /* NULL: none */
    kvant_cuda_pages pages;
    uint32_t n_kv_heads, head_dim;
    size_t page_bytes, n_weights; /* per kv head: 0, head_dim or head_dim^2 */
    size_t most_weights;          /* the same, with a matrix of the first rows */
    kvp_gpu_memory numbers;       /* weights, inverse weights, centre, scale, query scale */
    kvp_gpu_memory further[KVP_MOST_RANGES - 1]; /* of later ranges: weights, inverse weights */
    kvp_gpu_memory key_center;    /* as attention takes it (k_center): of the first range */
    kvp_gpu_memory starts;        /* by range centres of a block at position 0, then by range those of blocks whose position is not known */
    bool turns;                   /* rows are about these */
    uint32_t further_made;        /* a bit for each range that has some */
    struct kvp_gpu_moved {        /* the same of keys that moved, by id; of.by 0: none */
        kvp_gpu_memory numbers;
        kvp_gpu_lineage of;
    } moved[KVP_MOST_MOVED];
    kvant_rope rope;              /* that these moved by; size 0: none did */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    uint32_t n_shifts;            /* of its cache, that its keys took part in */
    const float *weights, *inverse_weights; /* NULL: none */
    float *center, *scale, *query_scale;    /* NULL: none */
    bool learns, learnt;                    /* centre or scale from the first rows */
    bool uncentred;                         /* attention has a softcap */
    bool has_room;                          /* behind the outputs of attention on it */
    kvp_gpu_cache *cache;
    bool in_place; /* rows are fp16 where llama.cpp puts them: nodes over them are CUDA's */
    kvant_cuda_pages open_pages; /* base NULL: none was needed yet */
    kvp_gpu_memory open;         /* where nothing is reserved for them */
    kvant_cuda_codec *open_codec;
    struct kvp_gpu_learner *learner; /* of keys with transform=first; NULL: none is needed yet, or any more */
    bool weighs, weighed;            /* the last matrix is in force */
    size_t asked_bytes;              /* of the queries that are looked at, of the longest batch that was planned; 0: none was */
    size_t asked_row, asked_first;   /* of a token's queries in bytes, 0: not known; where they are in decoded.asked */
    bool asked;                      /* they are there */
    bool waits;                      /* keys of a first batch, for their matrix: in no sealed page yet */
    float *waiting;                  /* these, as they came */
    kvant_cuda_codec *codecs[2], *open_codecs[2]; /* without and with a matrix: codec and open_codec are of these */
    kvant_codec *made; /* what the latter were made of */
} kvp_gpu_cells;


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
    bool on_ours;         /* what was enqueued last is on our stream */
    kvp_gpu_memory workspace, queries, centered, offsets; /* the latter: rows about their blocks' centres, and what queries get of these */
    struct kvp_gpu_scratch { /* of the attention node at hand */
        void *at;
        size_t bytes;
        float *offsets; /* of keys that turn */
    } scratch;
    kvp_compute compute;  /* for what the CPU computes: the context shift */
    abi_tensor front;     /* computes nothing and is never the same: keeps ggml-cuda from a capture of its own */
    abi_tensor **nodes;   /* of a part of a graph, behind the front */
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
    const void *positions; /* the place of the tokens' positions; NULL: unknown */
    bool warned;           /* that caches need them */
    struct kvp_gpu_attended { /* attention nodes of one mask; plain: it is not read */
        const void *mask;
        size_t n_cells, n_rows, n_streams;
        bool plain;
    } attended[KVP_MOST_MASKS];
    int n_attended;
    kvp_gpu_memory lengths; /* of the streams of each of these */
    bool masks_changed;     /* one became plain, or ceased to be, since a graph was captured */
    bool waits;           /* all of its rows went to open pages when it was captured */
    unsigned forms, looked_forms; /* of the caches of the graph at hand; and of the one that was looked at */
    kvp_gpu_cache *asking; /* which is in place and learns from queries of the batch at hand; NULL: none */
    bool asked;           /* it did, of the first layer */
    unsigned epoch;       /* when it was captured */
    atomic_uint *refused; /* kernels say here, in the computer's memory, which rows they did not store */
    struct kvp_layers *layers; /* of the llama context that made it */
    const void *context; /* whose caches its graphs attend to: the layers of these caches */
    struct kvp_gpu_fetched fetched[KVP_FETCHED_PLACES];
    bool looked, monotonous;   /* at the tokens of the batch; they are too much alike to learn a matrix from */
    cu_graph_exec exec;
    bool graphs, captured; /* graphs: may be captured */
    unsigned long n_graphs, n_parts, n_captures, n_launches;
};

/* devices.c: the devices of every GPU that CUDA's registry has; how many, 0 with a line in err (empty: no CUDA here). */
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

/* cells.c */
extern const kvp_remote kvp_gpu_remote;

/* The cells behind a tensor, or NULL. */
kvp_gpu_cells *kvp_gpu_cells_of(const abi_tensor *tensor);

/* Rows of a batch in the computer's memory, which go to the GPU and come back. The lock is held. */
size_t kvp_gpu_width(const kvp_gpu_cells *cells);
bool kvp_gpu_upload(kvp_gpu *gpu, void *to, const void *from, size_t bytes);
float *kvp_gpu_batch_room(kvp_gpu *gpu, size_t n, size_t width, int64_t **slots);

/* Gives the room back where it is more than reading and writing of states takes. Waits for the
 * stream then. */
void kvp_gpu_batch_done(kvp_gpu *gpu);
kvant_status kvp_gpu_decode_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n, float *out);

/* rows.c. The kvp_remote's functions (kv_tensor.h). */
kvant_status kvp_gpu_read_rows(const kvp_kv *kv, size_t cell, size_t n, float *rows);
kvant_status kvp_gpu_write_rows(kvp_kv *kv, const int64_t *cell_numbers, size_t n,
                                const float *rows);
bool kvp_gpu_copy_blocks(const kvp_kv *from, uint32_t first, kvp_kv *to, uint32_t to_first,
                         uint32_t n);

/* Rows of one, in the computer's memory when this returns; false with a message. */
bool kvp_gpu_fetch_block(const kvp_gpu_cells *cells, bool open, size_t block, float *rows);
kvant_status kvp_gpu_append(const kvp_gpu_cells *cells, kvant_role role, bool open, const float *rows, kvp_gpu_run run,
                            const int64_t *slots, atomic_uint *refused);
kvant_cuda_tables kvp_gpu_tables(const kvant_codec *source);
void kvp_gpu_free_codecs(kvant_codec **codecs, uint32_t n); /* of n, and the array; NULL: none */

/* learn.c. Learns centre and scale from n rows on the GPU, at least so many; waits for the stream. */
#define KVP_LEARN_ROWS 64u
bool kvp_gpu_learn(kvp_kv *kv, const float *rows, size_t stride, size_t n, cu_stream stream);

static inline bool kvp_gpu_is_learning(const kvp_gpu_cells *cells)
{
    return cells->learns && !cells->learnt;
}

/* Before a batch: notes its cells if they are too few, or learns from those noted before. The lock is held. */
bool kvp_gpu_learn_before(kvp_gpu_cache *cache, const int64_t *batch, size_t n, cu_stream stream);

/* From n rows in the computer's memory, at least so many, of a cache that noted none; false without a message. */
bool kvp_gpu_learn_from(kvp_gpu_cells *cells, const float *rows, size_t n);

/* The same before rows in the computer's memory are stored; and for blocks that are copied. */
bool kvp_gpu_learn_written(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows);
bool kvp_gpu_copy_first(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n);

/* weigh.c. Keys of a long batch are kept in the computer's memory, until attention brings their queries; then a thread learns from both.
 * settle waits for these threads and lets stored rows take their matrices. False with a message. wants: whether keys would be looked at; values: of the same tokens, or NULL; decodes: a token of each
 * sequence, whose queries may be on their way already. */
bool kvp_gpu_weigh_wants(kvp_gpu_backend *b, const abi_tensor *node, const abi_tensor *values, bool decodes);
bool kvp_gpu_weigh_keys(const abi_tensor *node);
void kvp_gpu_weigh_plan(kvp_gpu_cells *cells, const abi_tensor *q); /* of attention that will come: makes room for its copies */
bool kvp_gpu_weigh_queries(kvp_gpu_backend *b, const abi_tensor *node);
bool kvp_gpu_weigh_settle(kvp_gpu_cache *cache);
bool kvp_gpu_weigh_join(kvp_kv *kv); /* the same of a tensor */
bool kvp_gpu_weigh_later(const kvp_gpu_cache *cache, const kvp_gpu_step *step); /* of each when its next rows come: nobody reads others */

/* A version that was learnt: codecs, one per kv head (NULL: there is none), and centres of a block at position 0 (NULL: blocks share the
 * codecs'). */
typedef struct kvp_gpu_version {
    kvant_codec **codecs;
    float *start;
} kvp_gpu_version;

/* anew.c. A version comes in force; all rows take it. A codec that is kept becomes NULL. rows: copies of those of cache->plain, as far as
 * there are n. *done false: too many rows were stored already. The lock is held. */
bool kvp_gpu_store_anew(kvp_gpu_cells *cells, kvp_gpu_version *made, const float *rows, size_t n, bool *done);

/* size.c. These tell the most bytes that a cache tensor takes on a GPU next to its pages. The first
 * counts its transforms, the second pages and keys that wait for a matrix, and the third what
 * kvp_gpu_store_anew needs for one layer. */
size_t kvp_gpu_transform_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                               uint32_t n_kv_heads, uint32_t n_positions);
size_t kvp_gpu_waiting_bytes(const kvp_kv_shape *shape, const kvp_settings *settings);
size_t kvp_gpu_learning_room(const kvp_kv_shape *shape, const kvp_settings *settings);

/* The same of rows that wait, and of those of few tokens since; numbers were brought. The version may be none. */
bool kvp_gpu_store_waiting(kvp_gpu_cells *cells, kvp_gpu_version *made);

/* wait.c. Before a graph: what was learnt comes in force, and keys of the batch may have to wait. keep: these, which are on the GPU. end:
 * nothing waits any more; if later is set, keys wait till their layer's next rows come. The lock is held. */
bool kvp_gpu_wait_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, cu_stream stream);
bool kvp_gpu_wait_keep(kvp_gpu_cells *cells, const abi_tensor *keys);
bool kvp_gpu_are_few(const kvp_gpu *gpu, size_t bytes); /* a small part of what is free: others will need memory, too */
bool kvp_gpu_wait_end(kvp_gpu_cache *cache, bool later, cu_stream stream);
void kvp_gpu_wait_forget(kvp_gpu_cache *cache);
uint32_t kvp_gpu_wait_fresh(const kvp_gpu_cache *cache); /* pages, the first ones, with rows of few tokens, when it ended */

/* decoded.c. Before a graph: end, before anything is settled, says whether the threads' time has come. take, when it is, keeps rows and
 * queries of the steps before, and starts threads. note: a step's rows are in open pages. ask: attention of a few tokens copies
 * queries. tell: how keys turn, by the node that writes them. The lock is held. */
bool kvp_gpu_decoded_end(kvp_gpu_cache *cache, const kvp_gpu_step *step);
bool kvp_gpu_decoded_take(kvp_gpu_cache *cache, const kvp_gpu_step *step);
void kvp_gpu_decoded_note(kvp_gpu_cache *cache, const kvp_gpu_step *step, const int64_t *slots);
bool kvp_gpu_decoded_ask(const kvp_gpu *gpu, const abi_tensor *node);
void kvp_gpu_decoded_tell(const abi_tensor *node);
void kvp_gpu_decoded_forget(kvp_gpu_cache *cache);
void kvp_gpu_decoded_free(kvp_gpu_cache *cache);

/* weigh.c. Rows behind those of cache->plain; false without memory. */
bool kvp_gpu_weigh_add(kvp_gpu_cache *cache, const kvp_gpu_step *step);

/* weigh.c. Lists of cells: whether they end with a step's (-sm tensor: a batch is several graphs); those where other rows are now become -1. */
bool kvp_gpu_cells_end_with(const int64_t *cells, size_t n, const kvp_gpu_step *step);
void kvp_gpu_cells_lose(const kvp_gpu_cache *cache, int64_t *cells, size_t n, const int64_t *written, size_t n_written);

/* weigh.c. Cells are written: step NULL from the computer's memory, else by a batch. Forget: all rows are of the past. The lock is held. */
bool kvp_gpu_weigh_written(kvp_gpu_cache *cache, const int64_t *cells, size_t n, const kvp_gpu_step *step);
void kvp_gpu_weigh_forget(kvp_gpu_cache *cache);
void kvp_gpu_weigh_begin(kvp_gpu_cells *cells); /* anew, as free in learner.c; what a tensor needs for it is made in a thread */
void kvp_gpu_weigh_free(kvp_gpu_cells *cells);

/* The centre in numbers of a matrix; scale and query scale are behind it. */
static inline float *kvp_gpu_affine(const kvp_gpu_cells *cells, const kvp_gpu_memory *numbers)
{
    return (float *)numbers->at + 2 * cells->n_kv_heads * cells->most_weights;
}

/* cells.c. The matrix of a transform's id. If its range has none, the last range before counts. */
typedef struct kvp_gpu_matrix {
    const float *weights, *inverse_weights;
} kvp_gpu_matrix;
kvp_gpu_matrix kvp_gpu_matrix_of(const kvp_gpu_cells *cells, uint32_t transform);

/* ranges.c. The range of this number. */
kvp_gpu_range kvp_gpu_range_at(uint32_t number);

/* centers.c. tell: how a layer's keys turn, before there is a matrix; whether its blocks can have centres. assign: a block's rows are at
 * position and those behind it from now on. bring: phases to the GPU, of all blocks where it has none; false with a message. of: keys'
 * centres, which turn; first_block: of blocks that are counted from there. rows, blocks: subtracts (add: adds) centres, where keys have
 * some: of rows at cells of the GPU, of rows of blocks (open: of open pages). move: the keys of a
 * block moved, and its transform is another one. copy: of a block to another one. The lock is
 * held. */
bool kvp_gpu_centers_tell(const kvp_kv *kv, const abi_tensor *rows);
void kvp_gpu_centers_assign(kvp_gpu_cache *cache, size_t block, int32_t position);
void kvp_gpu_centers_move(kvp_gpu_cache *cache, size_t block, int32_t by);
void kvp_gpu_centers_copy(kvp_gpu_cache *cache, size_t block, size_t to);
bool kvp_gpu_centers_bring(kvp_gpu_cache *cache, cu_stream stream);
kvant_cuda_turning kvp_gpu_turning_of(const kvp_gpu_cells *keys, size_t first_block);
kvant_status kvp_gpu_center_rows(const kvp_gpu_cells *keys, const float *rows, size_t stride, size_t n, const int64_t *cells, bool add,
                                 float *out);
kvant_status kvp_gpu_center_blocks(const kvp_gpu_cells *keys, bool open, size_t first, size_t n, bool add, float *rows);
void kvp_gpu_centers_forget(kvp_gpu_cache *cache);
void kvp_gpu_centers_free(kvp_gpu_cache *cache);

/* shift.c. A ROPE node on keys, which moves them. True: it was done or failed, as *status says.
 * False: keys have to be decoded, rotated and encoded again. The lock is held. */
bool kvp_gpu_shift(kvp_gpu_backend *b, const abi_tensor *node, int32_t *status);

/* shift_keys.c. takes: whether keys of a layer can move by getting other matrices. matrices: makes
 * those of keys that moved, after a shift or after the matrices that they are made of changed.
 * mixed: moves keys that move by another number of positions than their block. reset: encodes all
 * keys that moved once more, so that their blocks have ids of ranges. free: when no work that uses
 * the matrices is left. False: the caller has to say so. The lock is held. */
bool kvp_gpu_shift_takes(const kvp_gpu_cells *cells);
bool kvp_gpu_shift_matrices(kvp_gpu_cells *cells);
bool kvp_gpu_shift_mixed(const kvp_gpu_cells *cells);
bool kvp_gpu_shift_reset(kvp_gpu_cache *cache);
void kvp_gpu_shift_free(kvp_gpu_cells *cells);

/* ranges.c. Whether a cache with matrices saw the step before: with -sm tensor it is several graphs. */
bool kvp_gpu_ranges_saw(const kvp_gpu_cache *cache, const kvp_gpu_step *step);

/* ranges.c. Before a graph: which matrix the rows of a batch get, and which further one is to be made; then, once blocks have these rows,
 * their numbers. forget: all rows are of the past. The lock is held. */
bool kvp_gpu_ranges_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step);
bool kvp_gpu_ranges_bring(kvp_gpu_cache *cache, cu_stream stream);

/* ranges.c. Before rows at positions up to last are stored: the matrix that was asked for comes in
 * force, and threads begin to make that of the next range. The lock is held. */
void kvp_gpu_ranges_foresee(kvp_gpu_cache *cache, int32_t last);
void kvp_gpu_ranges_forget(kvp_gpu_cache *cache);
void kvp_gpu_ranges_free(kvp_gpu_cache *cache);
void kvp_gpu_ranges_copy(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n); /* n blocks */

/* Whether rows of the last step are of the first range. */
bool kvp_gpu_in_first_range(const kvp_gpu_cache *cache);

/* How many runs the batch at hand has. */
size_t kvp_gpu_runs(const kvp_gpu_cells *keys);

/* Whether blocks' keys may have different transforms; else all have id 0. */
bool kvp_gpu_has_transforms(const kvp_gpu_cells *keys);

/* How many matrices attention on the keys has, and the id of each. */
uint32_t kvp_gpu_matrices(const kvp_gpu_cells *keys);
uint32_t kvp_gpu_transform_at(const kvp_gpu_cells *keys, uint32_t number);

/* The block of an open page, or of a sealed one; -1: of none. */
int64_t kvp_gpu_block_at(const kvp_gpu_cache *cache, bool open, size_t number);

/* The longest run of blocks (open: of open pages), or of cells, whose keys have one transform: from
 * the first-th on, of n blocks, or before the n-th cell. */
kvp_gpu_run kvp_gpu_run_of_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n);
kvp_gpu_run kvp_gpu_run_of_cells(const kvp_gpu_cache *cache, const int64_t *numbers, size_t first, size_t n);

/* cells.c: what a version of the first range says is brought to the GPU (which waits for the stream; NULL: one that orders nothing), and
 * becomes the cells'; or weights and centres of a later one. */
bool kvp_gpu_bring_numbers(kvp_gpu_cells *cells, const kvant_codec *const *codecs, const float *start, cu_stream stream);
bool kvp_gpu_bring_range(kvp_gpu_cells *cells, uint32_t range, const kvp_gpu_version *version, const float *mean);
void kvp_gpu_take_numbers(kvp_gpu_cells *cells, const kvant_codec *const *codecs);

/* cells.c. A tensor without rows has neither centre nor scale nor matrix of some any more. */
void kvp_gpu_unlearn(kvp_gpu_cells *cells);

/* open.c. holds: a cell has a row from now on. holds_copies: blocks have rows in the cells in which
 * other blocks have some. is_empty: no cell has a row. The lock is held. */
void kvp_gpu_cache_holds(kvp_gpu_cache *cache, int64_t cell);
void kvp_gpu_cache_holds_copies(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n);
bool kvp_gpu_cache_is_empty(const kvp_gpu_cache *cache);

/* open.c: the open page with a cell, or -1. have_pages: n of a tensor, in the memory reserved for
 * them. close_all: no block has one any more. */
#define KVP_NO_PAGE (-1)
int64_t kvp_gpu_page_of(const kvp_gpu_cache *cache, int64_t cell);
size_t kvp_gpu_open_page_bytes(const kvp_gpu_cells *cells); /* of a kv head */
bool kvp_gpu_have_pages(kvp_kv *kv, uint32_t n);
void kvp_gpu_close_all(kvp_gpu_cache *cache);

/* Room for copies of a layer's keys and queries, which one of its threads gives back by sem_post(&free); NULL with a message. stage
 * copies every step-th row within the GPU; to: where it comes to be, ne[1] of them. send brings both, and then records copied. reserve: for
 * so many bytes, before there are any, where nobody uses it. have_copying: their stream. The lock is held. */
bool kvp_gpu_have_copying(kvp_gpu *gpu);
struct kvp_gpu_copies *kvp_gpu_copies_of(kvp_gpu *gpu);
void kvp_gpu_copies_reserve(kvp_gpu *gpu, size_t keys, size_t queries);
bool kvp_gpu_copies_stage(kvp_gpu *gpu, struct kvp_gpu_copy *copy, const abi_tensor *from, size_t step, abi_tensor *to);
bool kvp_gpu_copies_send(kvp_gpu *gpu, struct kvp_gpu_copies *copies);
void kvp_gpu_copies_release(kvp_gpu *gpu); /* the last back end goes */
void kvp_gpu_fetch_release(kvp_gpu_backend *b);

/* A copy in the computer's memory, which stays until the next one of this place; false without memory. Waits for the stream. */
bool kvp_gpu_fetch(kvp_gpu_backend *b, kvp_fetched place, const abi_tensor *from, abi_tensor *to);

/* Rows on the GPU as an append takes them: those of a run. */
kvant_cuda_rows kvp_gpu_rows(const kvp_gpu_cells *cells, const float *rows, size_t stride, kvp_gpu_run run);

/* The numbers 0, 1, ... on the GPU. */
const int32_t *kvp_gpu_numbers(const kvp_gpu *gpu);

/* open.c. A tensor's cells join the cache of their buffer. The GPU's lock is held for all of these. */
bool kvp_gpu_cache_join(kvp_kv *kv, const kvant_codec_info *info);
void kvp_gpu_cache_leave(kvp_kv *kv);

/* step.c. Prepares a cache for a graph: opens blocks for the rows of a batch, and brings table and
 * slots to the GPU. mask is that of attention over the cache, or NULL. */
bool kvp_gpu_cache_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask,
                           cu_stream stream);
const int64_t *kvp_gpu_open_slots(const kvp_gpu_cache *cache);

/* open.c. Carries a plan's changes out for all tensors: encodes blocks that are sealed, then
 * decodes blocks that are opened. After an error all pages are as they were, in the plan, too. */
bool kvp_gpu_carry_out(kvp_gpu_cache *cache, const kvant_plan_changes *changes, cu_stream stream);

/* open.c. Gives a page to another block, or to none. The rows of its former block are forgotten. */
void kvp_gpu_put_page(kvp_gpu_cache *cache, uint32_t page, int32_t block);

/* step.c. Whether all blocks of a step are open, or empty with a free page, so that nothing is
 * encoded or decoded before its graph. */
bool kvp_gpu_opens_empty(const kvp_gpu_cache *cache, const kvp_gpu_step *step);

/* step.c. Slots of cells in open pages, -1 for those without; how many have one. */
size_t kvp_gpu_slots_of(const kvp_gpu_cache *cache, const int64_t *cells, size_t n, int64_t *slots);

/* step.c. Before rows of a tensor are written without a graph, or blocks of 64 cells are copied:
 * opens blocks as the plan decides. The cache is settled. Rows without positions follow each other.
 * open_copies opens the copies of blocks that are open; their pages are still to be copied. */
bool kvp_gpu_open_written(const kvp_kv *kv, const kvp_gpu_step *step, cu_stream stream);
bool kvp_gpu_open_copies(const kvp_kv *kv, uint32_t first, uint32_t to, uint32_t n);

/* step.c. Opens blocks that have rows, as far as there are pages for them. */
bool kvp_gpu_open_blocks(kvp_gpu_cache *cache, const uint32_t *blocks, uint32_t n,
                         cu_stream stream);

/* borrow.c. While a batch waits (wait.c), pages are borrowed, and the plan does not know them.
 * kvp_gpu_borrow gives them to the blocks of a step. kvp_gpu_page_stays tells whether a page has
 * first or newest tokens. kvp_gpu_assign_page makes a page a block's own after the wait, and tells
 * the plan. */
void kvp_gpu_borrow(kvp_gpu_cache *cache, const kvp_gpu_step *step);
bool kvp_gpu_page_stays(const kvp_gpu_cache *cache, uint32_t page);
void kvp_gpu_assign_page(kvp_gpu_cache *cache, uint32_t page, int32_t block);

/* Sealed pages hold all rows afterwards. forget: all rows are of the past. */
bool kvp_gpu_cache_settle(kvp_gpu_cache *cache, cu_stream stream);
void kvp_gpu_cache_forget(kvp_gpu_cache *cache);

/* A word in the computer's memory that kernels write to (KVANT_CUDA_ROW_*); NULL with a message. take: what they wrote since. */
atomic_uint *kvp_gpu_new_word(void);
kvant_status kvp_gpu_take_word(atomic_uint *word);

/* The same word for kernels, which change it by atomic operations of their own. */
static inline uint32_t *kvp_gpu_word(atomic_uint *word)
{
    return (uint32_t *)(uintptr_t)word;
}

/* devices.c: the batch whose cell numbers lie at this address of the GPU; false: they were not
 * seen. positions: where those of the batch lie, or NULL. forget: when nobody computes any more. */
bool kvp_gpu_find_step(kvp_gpu *gpu, const void *cells, const void *positions, size_t n,
                       kvp_gpu_step *step);
const int32_t *kvp_gpu_positions_at(const kvp_gpu *gpu, const void *at, size_t n); /* or NULL */
void kvp_gpu_forget_inputs(kvp_gpu *gpu);

/* marks.c. create: before anything is stored. notice: what kernels marked since, for this reason;
 * waits for the stream. prepare: before a graph that writes a step's cells (NULL: none, or not
 * known), which lie in the graph's input `cells`. numbers: those cells on the GPU, during a graph
 * of at most KVP_FEW_TOKENS tokens. any: the computer knows of some. The lock is held. */
bool kvp_gpu_marks_create(kvp_gpu_cache *cache);
void kvp_gpu_marks_free(kvp_gpu_cache *cache);
bool kvp_gpu_marks_notice(kvp_gpu_cache *cache, kvant_status why);
bool kvp_gpu_marks_prepare(kvp_gpu_cache *cache, const abi_tensor *cells, const kvp_gpu_step *step,
                           cu_stream stream);
int64_t *kvp_gpu_marks_numbers(const kvp_gpu_cache *cache);
bool kvp_gpu_marks_any(const kvp_gpu_cache *cache);

/* masks.c. A mask on its way to the GPU; the lock is held. */
void kvp_gpu_note_mask(kvp_gpu *gpu, const abi_tensor *tensor, const void *data, size_t size);

/* kvp_gpu_mask_of returns the mask of an attention node over a step of n rows, or NULL if it did
 * not pass the device. kvp_gpu_mask_sees tells whether a row of the step sees cells of a block.
 * Blocks count from the first one of the row's stream. kvp_gpu_forget_masks forgets the masks of the
 * graph that was prepared. The lock is held. */
const kvp_gpu_mask *kvp_gpu_mask_of(const kvp_gpu *gpu, const abi_tensor *node, size_t n);
bool kvp_gpu_mask_sees(const kvp_gpu_mask *mask, size_t row, size_t block);
void kvp_gpu_forget_masks(kvp_gpu_backend *b);

/* Adds an attention node to those of its mask; false: there are too many masks or streams. */
bool kvp_gpu_find_attended(kvp_gpu_backend *b, const abi_tensor *node);
int kvp_gpu_attended_of(const kvp_gpu_backend *b, const abi_tensor *node);

/* Before a graph: which masks are plain, and how many cells each stream has, on the GPU. */
bool kvp_gpu_prepare_attended(kvp_gpu_backend *b);
const int32_t *kvp_gpu_lengths(const kvp_gpu_backend *b, int attended);

/* ops.c: whether a node is ours, and what to do for it. A node that touches cache tensors and is not supported must not
 * be given to CUDA. */
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

/* attention.c. new_cells: NULL, or those of the newest rows, one per stream. transformed: queries went through their matrix with the rows of
 * their tokens, by what queries_of_pair said; q NULL: they need none, or go by themselves. False without memory. */
int32_t kvp_gpu_attention(kvp_gpu_backend *b, abi_tensor *node, const int64_t *new_cells, bool transformed);
bool kvp_gpu_queries_of_pair(kvp_gpu_backend *b, const abi_tensor *node, kvant_cuda_query_args *queries);

/* Enqueues the node on the back end's stream; values: NULL, or the second of a pair; attending: NULL, or the attention
 * that comes with a pair. */
int32_t kvp_gpu_compute(kvp_gpu_backend *b, abi_tensor *node, abi_tensor *values, abi_tensor *attending);

/* attention.c. Bytes that an attention node's output has behind it, for unpacked pages of many query rows and for what these get of centres:
 * so --fit counts them. */
size_t kvp_gpu_room(kvp_gpu *gpu, const abi_tensor *node);

/* accel.c: llama.cpp's own cache stays, and attention nodes over it are ours where kvp_gpu_accelerates says so. */
void kvp_gpu_set_accel(bool on);
bool kvp_gpu_accel(void);
bool kvp_gpu_accelerates(const abi_tensor *node);
int32_t kvp_gpu_accelerate(kvp_gpu_backend *b, const abi_tensor *node);

/* edges.c: takes edges out of a captured graph that order nothing; false: the graph must not be used. */
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
