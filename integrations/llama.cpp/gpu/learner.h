/* learner.h - what a layer's matrix is learnt with: a tensor in the computer's memory, and threads that write rows and queries of batches to
 * it. weigh.c says which, and what comes in force. */
#ifndef KVP_CUDA_LEARNER_H
#define KVP_CUDA_LEARNER_H

#include "gpu.h"

/* Rows that a thread looks at, with their queries. */
struct kvp_gpu_batch {
    struct kvp_gpu_batch *before; /* whose thread ends first; NULL: none */
    kvp_gpu_cells *cells;
    struct kvp_gpu_copies *copies; /* NULL: rows are still in GPU memory, when `ready` has come */
    cu_event ready;
    abi_tensor keys, queries;    /* there */
    int32_t *positions, *asked;  /* of keys, of queries; NULL: not known */
    size_t first, n;             /* of the learner's rows */
    pthread_t thread;
    bool begun, alone, ok; /* begun: its queries came. alone: in a thread of its own */
    bool waits;            /* nothing else reads the cells' numbers */
    atomic_bool followed;  /* by a batch that was begun */
};

typedef struct kvp_gpu_learner {
    kvant_codec *codec; /* encodes quickly, learns the same */
    kvant_tensor *tensor;
    void *memory;
    float *rows; /* of cells of cache->plain, as far as they came */
    size_t n, most;
    char *queries;             /* room for copies of a batch's */
    atomic_bool queries_taken; /* by a thread */
    uint32_t number; /* of the tensor's version that was asked for last, and its centre */
    float *center;
    struct kvp_gpu_batch *last;   /* whose thread may run, or which waits for its queries */
    kvp_gpu_version made; /* the new one */
    bool told, turns;     /* how keys turn; so that their blocks can have centres */
    bool begins;          /* with rows of the first range, which are all that the first matrix is for */
    bool failed;          /* a thread, since what was learnt was taken */
    atomic_bool dropped;  /* nobody will use the result, so threads that have not begun learn nothing */
    pthread_t maker; /* of codec, tensor and memory, later of a further matrix */
    bool making;
    kvp_gpu_range range; /* that this one is for */
    bool made_range;
} kvp_gpu_learner;

/* Makes codec, tensor and memory in a thread, once. */
void kvp_gpu_learner_make(kvp_gpu_cells *cells);

/* When these are there; NULL without memory. */
kvp_gpu_learner *kvp_gpu_learner_of(kvp_gpu_cells *cells);

/* The last keys of cache->plain, whose queries are to come; false without memory. start: they came, and were sent. finish waits for all
 * threads. drop frees what they made. */
bool kvp_gpu_learner_add(kvp_gpu_cells *cells, const abi_tensor *keys);
void kvp_gpu_learner_start(struct kvp_gpu_batch *batch);
void kvp_gpu_learner_finish(kvp_gpu_learner *l);
void kvp_gpu_learner_drop(const kvp_gpu_cells *cells, kvp_gpu_learner *l);

/* A thread learns from keys, the last rows of cache->plain, and queries at these positions. Both are in GPU memory, where they stay until
 * it is done, after an event. False without memory. */
bool kvp_gpu_learner_learn(kvp_gpu_cells *cells, const abi_tensor *keys, const abi_tensor *queries, const int32_t *positions, cu_event ready);

/* Once: how keys turn, as the rows' graph says. */
void kvp_gpu_learner_tell(kvp_gpu_learner *l, const kvp_kv *kv, const abi_tensor *rows);

/* Everything was learnt; what later ranges need is kept. ask: a thread makes the matrix of one; false: there is nothing to make it of.
 * answer waits for it; false: it failed. True where nothing was asked. */
void kvp_gpu_learner_keep(const kvp_gpu_cells *cells, kvp_gpu_learner *l);
bool kvp_gpu_learner_ask(kvp_gpu_cells *cells, const kvp_gpu_range *range);
bool kvp_gpu_learner_answer(kvp_gpu_cells *cells);

#endif /* KVP_CUDA_LEARNER_H */
