/* learner.h - learns a layer's key transforms with a kvant_tensor in the computer's memory. A
 * thread writes keys and queries to it. first.c and ready.c decide which, and when a transform
 * comes in force. */
#ifndef KVP_CUDA_LEARNER_H
#define KVP_CUDA_LEARNER_H

#include "gpu.h"

/* The keys and queries from which a first key transform is learned. */
typedef struct kvp_gpu_lesson {
    size_t n;    /* number of keys */
    float *rows; /* or NULL; the learner frees them */
    /* instead of rows: fp16 keys on the GPU, readable when cache->asked.ready has come */
    const void *halves;
    int32_t *positions; /* or NULL: not known; the learner frees them */
    /* Batches of queries in GPU memory, readable at the same time (queries.c), and the bytes of one
     * token's queries. */
    const char *queries[KVP_ASKED_BATCHES];
    uint32_t n_batches;
    size_t row;
    int32_t asked[KVP_ASKED_BATCHES * KVP_ASKED_TOKENS]; /* positions of the queries' tokens */
} kvp_gpu_lesson;

typedef struct kvp_gpu_learner {
    kvant_codec *codec; /* encodes quickly, and learns the same transform */
    kvant_tensor *tensor;
    void *memory;
    /* told: it is known how RoPE rotates keys; turns: so the blocks can have centres */
    bool told, turns;
    kvant_rope rope; /* size 0: not known */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    /* the rows are in the first position bucket, so the first key transform is for this bucket
     * only */
    bool begins;
    kvp_gpu_lesson lesson;
    pthread_t thread;
    /* begun: a thread was started for the first key transform; runs: it was not joined yet */
    bool begun, runs;
    bool failed; /* there was no memory */
    kvp_gpu_version made;
    /* no caller uses the result, so a thread that starts later learns nothing */
    atomic_bool dropped;
    pthread_t maker; /* the thread for a further key transform */
    bool making;
    kvp_gpu_range range; /* the position bucket that it learns for */
    bool made_range;
} kvp_gpu_learner;

/* Notes, once, how RoPE rotates keys, which their graph shows. */
void kvp_gpu_learner_tell(const kvp_kv *kv, const abi_tensor *rows);

/* `kvp_gpu_learner_learn` starts a thread, once, that learns the first key transform from keys and
 * from queries that were kept. `kvp_gpu_learner_finish` waits for it. `kvp_gpu_learner_drop` frees
 * its result. */
void kvp_gpu_learner_learn(kvp_gpu_cells *cells, const kvp_gpu_lesson *lesson);
void kvp_gpu_learner_finish(kvp_gpu_learner *l);
void kvp_gpu_learner_drop(const kvp_gpu_cells *cells, kvp_gpu_learner *l);

/* `kvp_gpu_learner_ask` starts a thread that learns the transform of a further position bucket;
 * false when there is nothing to learn it from. `kvp_gpu_learner_answer` waits for the thread;
 * false when it failed, true when no thread was started. */
bool kvp_gpu_learner_ask(kvp_gpu_cells *cells, const kvp_gpu_range *range);
bool kvp_gpu_learner_answer(kvp_gpu_cells *cells);

#endif /* KVP_CUDA_LEARNER_H */
