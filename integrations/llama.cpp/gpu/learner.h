/* learner.h - makes a layer's first key transform, and the key transforms of further position
 * buckets. A thread per layer writes keys and queries to a tensor in the computer's memory, which
 * learns from them. A learner knows neither graphs nor caches. Its callers, first_matrix.c and
 * ready.c, choose the keys and queries, and decide when a key transform comes in force. */
#pragma once

#include "gpu.h"

/* The keys and queries from which a first key transform is learned. */
typedef struct kvp_gpu_learner_input {
    size_t n;    /* keys */
    float *rows; /* or NULL; the learner frees them */
    const void
        *halves;      /* the keys as fp16 on the GPU, if rows is NULL; enqueued work writes them */
    uint32_t *places; /* which of n_all rows or halves are the keys; NULL: the first n. The learner
                       * frees them */
    size_t n_all;
    int32_t *positions; /* or NULL: not known; the learner frees them */
    bool hurries;       /* somebody waits for the matrix soon, so more threads work at once */
    uint32_t ahead;     /* the position bucket that the thread goes on with; 0: none */
    /* Batches of queries in GPU memory, readable at the same time (queries.c), and the bytes of one
     * token's queries. */
    const char *queries[KVP_KEPT_BATCHES];
    uint32_t n_batches;
    size_t row;
    int32_t
        query_positions[KVP_KEPT_BATCHES * KVP_KEPT_TOKENS]; /* positions of the queries' tokens */
} kvp_gpu_learner_input;

/* lesson.c. list_pages finds the pages with rows whose keys have the transform of the first
 * position bucket, or none yet. cell_of returns the cell of a row in these pages, or -1 if the row
 * was never written. count_rows counts the rows that are learned from. known says that some rows
 * have positions: rows without a position are left out then. */
kvp_gpu_page_list kvp_gpu_list_pages(const kvp_gpu_cache *cache);
int64_t kvp_gpu_cell_of(const kvp_gpu_cache *cache, const kvp_gpu_page_list *list, size_t row);
size_t kvp_gpu_count_rows(const kvp_gpu_cache *cache, const kvp_gpu_page_list *list, bool known);

/* lesson.c. fetch_learned: the rows that count, in the computer's memory; the caller frees them.
 * NULL with a message, or without memory. learning_layer: which of the layers that learn matrices
 * these cells are, or how many there are. */
float *kvp_gpu_fetch_learned(const kvp_gpu_cells *cells, const kvp_gpu_page_list *list, bool known);
size_t kvp_gpu_learning_layer(const kvp_gpu_cache *cache, const kvp_gpu_cells *cells);

/* held.c. hold lists the rows of a cache's exact pages, for all of its layers. bring_held copies
 * such a list to the GPU. decode copies a layer's rows to the GPU's room for a batch. store puts
 * these rows into their pages with the transform that the layer has at that time. False with a
 * message or without memory: the rows are unchanged after hold and decode. */
bool kvp_gpu_hold_rows(kvp_gpu_cache *cache, kvp_gpu_held_rows *held);
bool kvp_gpu_bring_held(kvp_gpu_cache *cache, kvp_gpu_held_rows *held);
bool kvp_gpu_decode_held(const kvp_gpu_cells *cells, kvp_gpu_held_rows *held);
bool kvp_gpu_store_held(const kvp_gpu_cells *cells, const kvp_gpu_held_rows *held);

/* held.c. Keys that get no matrix learn centre and scale from the rows, if there are 64 of them. */
bool kvp_gpu_center_held(kvp_gpu_cells *cells, kvp_gpu_held_rows *held);

/* lesson.c. lessons_begin comes before the lessons of all layers. It returns false if exact
 * pages have too few rows, or if the tokens of these rows are too much alike. lesson_of copies a
 * layer's rows, so that later steps may change the pages. It returns false without memory. */
bool kvp_gpu_lessons_begin(kvp_gpu_cache *cache);
bool kvp_gpu_lesson_of(const kvp_gpu_cells *cells, kvp_gpu_learner_input *lesson);
void kvp_gpu_lesson_free(kvp_gpu_learner_input *lesson);

typedef struct kvp_gpu_learner {
    kvant_codec *codec; /* encodes quickly, and learns the same transform */
    kvant_tensor *tensor;
    void *memory;
    /* rope_is_set: it is known how RoPE rotates keys; has_block_centers: so the blocks can have
     * centres */
    bool rope_is_set, has_block_centers;
    kvant_rope rope; /* size 0: not known */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    /* the rows are in the first position bucket, so the first key transform is for this bucket
     * only */
    bool begins;
    kvp_gpu_learner_input lesson;
    cu_event ready; /* threads may read the lesson */
    pthread_t thread;
    /* begun: a thread was started for the first key transform; runs: it was not joined yet */
    bool begun, runs;
    uint32_t ticket; /* of the thread, in the queue of threads that learn */
    bool failed;     /* there was no memory */
    kvp_gpu_learned_transform made;
    bool brought; /* the cells' arrays on the GPU have the numbers of made; nobody reads them yet */
    kvant_cuda_codec *sealed, *open; /* what kernels need for made; NULL: the cells have them */
    /* no caller uses the result, so a thread that starts later learns nothing */
    atomic_bool dropped;
    pthread_t maker; /* the thread for a further key transform */
    /* making: its result was not used yet; maker_runs: it was not joined yet */
    bool making, maker_runs, making_hurries;
    atomic_bool made_over;      /* that thread has nothing left to do */
    bool ahead;                 /* nobody has asked for its transform yet */
    kvant_lesson_bucket bucket; /* the position bucket that it learns for */
    bool made_bucket;
    void *bucket_kept; /* the transform as records hold it, or NULL */
} kvp_gpu_learner;

/* Notes, once, how RoPE rotates keys, which their graph shows. */
void kvp_gpu_learner_set_rope(const kvp_kv *kv, const abi_tensor *rows);

/* A thread makes the first matrix of keys, and of queries that were kept, once. It reads what the
 * work enqueued so far writes. The learner owns the arrays of the lesson, also after an error
 * (false, with a message). finish waits for the thread. finish_all also waits for the thread of a
 * further key transform, and keeps its result. drop frees the results of the first thread. If
 * the lesson says so, another thread goes on with the transform of a further bucket. That transform
 * depends on the same rows alone, so it is the same whenever it is made. */
bool kvp_gpu_learner_start(kvp_gpu_cells *cells, const kvp_gpu_learner_input *lesson);
void kvp_gpu_learner_finish(kvp_gpu_learner *l);
void kvp_gpu_learner_finish_all(kvp_gpu_learner *l);
void kvp_gpu_learner_drop(const kvp_gpu_cells *cells, kvp_gpu_learner *l);

/* `kvp_gpu_learner_request` starts a thread that learns the transform of a further position bucket,
 * once for a bucket. With `hurries`, somebody will wait for it soon. False: there is nothing to
 * learn it from. `kvp_gpu_learner_answer` waits for the thread. It returns false when the thread
 * failed, and true when no thread was started. */
bool kvp_gpu_learner_request(kvp_gpu_cells *cells, const kvant_lesson_bucket *bucket, bool hurries);
bool kvp_gpu_learner_answer(kvp_gpu_cells *cells);
