/* learner.h - a tensor in the computer's memory makes a layer's matrices. A thread writes keys and
 * queries to it. first.c and ready.c say which, and when a matrix comes in force. */
#ifndef KVP_CUDA_LEARNER_H
#define KVP_CUDA_LEARNER_H

#include "gpu.h"

/* Keys and queries that a first matrix is made from. */
typedef struct kvp_gpu_lesson {
    size_t n;           /* keys */
    float *rows;        /* or NULL; the learner frees them */
    const void *halves; /* instead of rows: as fp16 on the GPU, when cache->asked.ready has come */
    int32_t *positions; /* or NULL: not known; the learner frees them */
    /* Batches of queries in GPU memory, likewise (queries.c), and the bytes of one token. */
    const char *queries[KVP_ASKED_BATCHES];
    uint32_t n_batches;
    size_t row;
    int32_t asked[KVP_ASKED_BATCHES * KVP_ASKED_TOKENS]; /* positions */
} kvp_gpu_lesson;

typedef struct kvp_gpu_learner {
    kvant_codec *codec; /* encodes quickly, learns the same */
    kvant_tensor *tensor;
    void *memory;
    bool told, turns; /* how RoPE rotates keys; so that their blocks can have centres */
    kvant_rope rope;  /* size 0: not known */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    bool begins; /* with rows of the first range, so the first matrix is for these alone */
    kvp_gpu_lesson lesson;
    pthread_t thread;
    bool begun, runs; /* a thread makes the first matrix, or made it; it was not joined yet */
    bool failed;      /* there was no memory */
    kvp_gpu_version made;
    atomic_bool dropped; /* nobody uses the result, so a thread that comes later learns nothing */
    pthread_t maker;     /* of a further matrix */
    bool making;
    kvp_gpu_range range; /* that this one is for */
    bool made_range;
} kvp_gpu_learner;

/* Once: how RoPE rotates keys, as their graph says. */
void kvp_gpu_learner_tell(const kvp_kv *kv, const abi_tensor *rows);

/* A thread makes the first matrix of keys, and of queries that were kept, once. finish waits for
 * it. drop frees what it made. */
void kvp_gpu_learner_learn(kvp_gpu_cells *cells, const kvp_gpu_lesson *lesson);
void kvp_gpu_learner_finish(kvp_gpu_learner *l);
void kvp_gpu_learner_drop(const kvp_gpu_cells *cells, kvp_gpu_learner *l);

/* ask: a thread makes the matrix of a further range; false: there is nothing to make it of. answer
 * waits for it; false: it failed. True where nothing was asked. */
bool kvp_gpu_learner_ask(kvp_gpu_cells *cells, const kvp_gpu_range *range);
bool kvp_gpu_learner_answer(kvp_gpu_cells *cells);

#endif /* KVP_CUDA_LEARNER_H */
