/* learner.h - makes a layer's first key transform, and the key transforms of further position
 * buckets, by work that is enqueued in the GPU's stream (kvant_cuda_learn). No thread waits for it.
 * A learner knows neither graphs nor caches. Its callers, first_matrix.c and ready.c, choose the
 * keys and queries, and decide when a key transform comes in force. */
#pragma once

#include "gpu.h"

#define KVP_LEARN_ROWS 512u /* keys that are added, at most: every second one of a lesson's */

/* The keys and queries from which key transforms are learned. Enqueued work writes the rows. */
typedef struct kvp_gpu_learner_input {
    size_t n;         /* keys */
    const void *rows; /* on the GPU */
    kvant_cuda_type type;
    size_t stride;      /* numbers from row to row */
    uint32_t *places;   /* which of n_all rows are the keys; NULL: the first n. The learner frees
                         * them */
    int32_t *positions; /* or NULL: not known; the learner frees them */
    size_t n_all;
    /* Batches of queries in GPU memory (queries.c), and the bytes of one token's queries. */
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
void kvp_gpu_lesson_free(const kvp_gpu_learner_input *lesson);

typedef struct kvp_gpu_learner {
    /* rope_is_set: it is known how RoPE rotates keys; has_block_centers: so the blocks can have
     * centres */
    bool rope_is_set, has_block_centers;
    kvant_rope rope; /* size 0: not known */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    /* the rows are in the first position bucket, so the first key transform is for this bucket
     * only */
    bool begins;
    kvant_cuda_learn_args args;
    bool begun;                  /* there was a lesson */
    struct learned_lists *lists; /* of a lesson that waits; NULL: it was enqueued, or failed */
    bool failed;                 /* there was no memory */
    bool brought; /* the cells' arrays have the first transform's numbers; nobody reads them yet */
    uint32_t bucket; /* the further bucket that was requested; 0: none */
} kvp_gpu_learner;

/* Notes, once, how RoPE rotates keys, which their graph shows. */
void kvp_gpu_learner_set_rope(const kvp_kv *kv, const abi_tensor *rows);

/* Takes a lesson, once. The learner owns its arrays, also after an error (false). `flush` enqueues
 * the lessons that wait, behind the work enqueued so far; it comes after a graph, or when a result
 * is needed. `waits`: some lesson waits. */
bool kvp_gpu_learner_start(kvp_gpu_cells *cells, const kvp_gpu_learner_input *lesson);
void kvp_gpu_learner_flush(kvp_gpu_cache *cache);
bool kvp_gpu_learner_waits(const kvp_gpu_cache *cache);

/* Brings matrices and centres of a bucket to the cells' arrays, which former work may still read,
 * before later work on the GPU's stream. */
bool kvp_gpu_learner_bring(kvp_gpu_cells *cells, uint32_t bucket);

/* Reads a transform for records; waits for the stream. False with a message. */
bool kvp_gpu_learner_read(const kvp_gpu_cells *cells, uint32_t bucket, uint16_t *triangles,
                          float *center, float *start);

/* `kvp_gpu_learner_request` asks for the transform of a further position bucket. False: there is
 * none. `kvp_gpu_learner_answer` brings it. It returns false without memory, and true when nothing
 * was requested. */
bool kvp_gpu_learner_request(kvp_gpu_cells *cells, const kvant_lesson_bucket *bucket);
bool kvp_gpu_learner_answer(kvp_gpu_cells *cells);
