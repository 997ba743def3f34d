/* index.h - nearest-neighbour search on compressed vectors (search.md).
 *
 * An index keeps vectors as codes of 1 to 8 bits per number and one factor per vector (two factors
 * for L2, and with a centre). A vector is rotated at random and rounded to a fixed codebook. Its
 * factor makes inner products right on average (src/index/format.md). Nothing needs training.
 * kvant_index_train helps codes of the same size to find more true neighbours.
 *
 *     kvant_index_params params = { .size = sizeof params, .dim = 384 };
 *     kvant_index_create(&params, &index, err, sizeof err);
 *     kvant_index_add(index, rows, 384, n, NULL, n_threads);
 *     kvant_index_query query = { .size = sizeof query, .rows = queries, .stride = 384,
 *                                 .n = 100, .k = 10 };
 *     kvant_index_search(index, &query, scores, ids);
 *
 * A search multiplies integers, and equal scores are ordered by id, the smaller id first. So
 * results do not depend on threads, on the CPU level, on the batch that contains a query, or on the
 * order in which vectors were added.
 *
 * Threads: functions that take a const kvant_index may run in any number of threads at once. Other
 * calls need the index for themselves.
 *
 * Memory: search allocates scratch for the call. add allocates when the index grows.
 *
 * Structs with a size field: set it to sizeof the struct. Every size from the first released struct
 * on is accepted. Functions write only that many bytes.
 */
#ifndef KVANT_INDEX_H
#define KVANT_INDEX_H

#include <kvant/kvant.h>

KVANT_BEGIN_C

#define KVANT_INDEX_MAX_DIM 8192u           /* more than the embeddings of usual models have */
#define KVANT_INDEX_MAX_VECTORS 4294967264u /* slots are 32-bit numbers, in packs of 32 */
#define KVANT_INDEX_NO_ID UINT64_MAX /* fills results that were not found; no vector has this id */

/* With inner product and cosine, larger scores are nearer. With L2 the score is the squared
 * distance, so smaller is nearer. Cosine keeps only the directions of vectors. */
typedef enum kvant_metric {
    KVANT_METRIC_INNER_PRODUCT = 0,
    KVANT_METRIC_COSINE = 1,
    KVANT_METRIC_L2 = 2
} kvant_metric;

typedef struct kvant_index kvant_index;

typedef struct kvant_index_params {
    size_t size;  /* set by the caller to sizeof(kvant_index_params) */
    uint32_t dim; /* 1 to KVANT_INDEX_MAX_DIM */
    kvant_metric metric;
    /* "NAME[:dims=N,lists=N,rows=int8,seed=N]"; NULL: "turboquant-4". Names:
     *
     *   turboquant-1 to 8
     *   trellis-2 to 4     smaller errors, but adding takes longer
     *   int-2 to 8
     *   rabitq-1 to 7      the grid of RaBitQ
     *   any other codec    of kvant/codec.h that encodes token by token; slow; e.g. octopus-3
     *
     * With dims=N the index keeps the N principal dimensions of the rows of kvant_index_train. With
     * lists=N it has inverted lists: each vector is in the list of the nearest of N centroids, and
     * a search reads the lists that are nearest to the query. An index with lists keeps ids.
     * Training must come first with dims=, and with lists= if there are no `centroids`. With
     * rows=int8 the index also keeps each vector with 8 bits per number, for rerank. */
    const char *spec;
    /* dim finite numbers that are subtracted before rounding, copied; NULL: none. */
    const float *center;
    /* For lists=N: centroid i is at i * centroid_stride; copied; NULL: k-means finds them. */
    const float *centroids;
    size_t centroid_stride, n_centroids;
} kvant_index_params;

/* Creates an empty index. KVANT_ERR_SPEC: the spec is not understood. KVANT_ERR_UNSUPPORTED: the
 * codec exists, but not for this dim, or it encodes several rows together. KVANT_ERR_NONFINITE: a
 * centre or a centroid. On an error *index is NULL and err, when errlen > 0, holds one line. */
KVANT_API kvant_status kvant_index_create(const kvant_index_params *params, kvant_index **index,
                                          char *err, size_t errlen);

/* Frees *index and sets it to NULL; a NULL pointer or a pointer to NULL is fine. */
KVANT_API void kvant_index_free(kvant_index **index);

/* Learns from n >= 1 rows: the centre, which is their mean; with dims= their principal directions;
 * and with lists= the centroids, if none were given. The index must be empty. About 10,000 rows are
 * enough. With dims= training computes n dim^2 products. A centre takes 4 bytes per vector unless
 * the metric is L2.
 *
 * KVANT_ERR_ARGUMENT: there are fewer rows than lists. KVANT_ERR_NONFINITE and KVANT_ERR_RANGE as
 * for kvant_index_add. KVANT_ERR_UNSUPPORTED: the index is a view, or is not empty. */
KVANT_API kvant_status kvant_index_train(kvant_index *index, const float *rows, size_t stride,
                                         size_t n);

/* Adds n rows of dim floats; row i is at rows + i * stride. ids has n different numbers that no
 * vector of the index has. With ids NULL, new ids count up from the largest id so far plus 1, or
 * from 0. Either all rows are added or none.
 *
 * KVANT_ERR_NONFINITE: a row holds a NaN or an infinity. KVANT_ERR_RANGE: a row is longer than
 * 2^60. KVANT_ERR_ARGUMENT: an id is in use already, or is KVANT_INDEX_NO_ID, or the index needs
 * training first. KVANT_ERR_UNSUPPORTED: the index is a view. KVANT_ERR_FULL: the index would hold
 * more than KVANT_INDEX_MAX_VECTORS vectors. */
KVANT_API kvant_status kvant_index_add(kvant_index *index, const float *rows, size_t stride,
                                       size_t n, const uint64_t *ids, uint32_t n_threads);

/* Removes a vector, in a time that does not depend on the number of vectors. After the first
 * removal the index keeps ids, which take 8 to 16 bytes per vector. KVANT_ERR_ARGUMENT: no vector
 * has this id. KVANT_ERR_UNSUPPORTED: the index is a view. KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_index_remove(kvant_index *index, uint64_t id);

typedef struct kvant_index_query {
    size_t size;       /* set by the caller to sizeof(kvant_index_query) */
    const float *rows; /* n queries of dim floats; query i at rows + i * stride */
    size_t stride, n;
    uint32_t k;         /* results per query, at least 1 */
    uint32_t n_threads; /* 0: 1 */
    /* Filters: a search finds only vectors that pass both of them. `allowed` may hold ids that no
     * vector has. `allow` is called by the caller's thread, once per vector that `allowed` lets
     * pass. */
    const uint64_t *allowed; /* n_allowed ids in any order, repeated or not; NULL: all pass */
    size_t n_allowed;
    int (*allow)(void *context, uint64_t id); /* NULL: all */
    void *allow_context;
    /* Reranking: the best `rerank` candidates (at least k) of each query get exact scores. These
     * need the vectors as they were added. They come from `original`, which n_threads threads call,
     * or from the array `originals`, where id i is at originals + i * original_stride if i <
     * n_originals. A candidate without such a vector (NULL) keeps its score. If neither is given,
     * an index with rows=int8 uses its own rows. */
    uint32_t rerank; /* 0: none */
    const float *originals;
    size_t original_stride;
    uint64_t n_originals;
    const float *(*original)(void *context, uint64_t id); /* NULL: the array */
    void *original_context;
    uint32_t n_probe; /* lists=: how many lists a search reads, at most all; 0: 8 */
} kvant_index_query;

/* Finds the k nearest vectors of every query: result j of query i is at scores[i * k + j] and ids[i
 * * k + j], the nearest first. If there are fewer than k, the remaining ids are KVANT_INDEX_NO_ID
 * and their scores are -infinity (L2: infinity).
 *
 * KVANT_ERR_NONFINITE: a query holds a NaN or an infinity. KVANT_ERR_RANGE: a query is longer than
 * 2^60. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_index_search(const kvant_index *index, const kvant_index_query *query,
                                          float *scores, uint64_t *ids);

/* row[0 .. dim - 1] = the vector as the index knows it, scaled as its inner products are.
 * KVANT_ERR_ARGUMENT: no vector has this id. KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_index_reconstruct(const kvant_index *index, uint64_t id, float *row);

/* Writes the index. The function writes a temporary file in the folder of path, flushes it to disk
 * and renames it to path, so path never holds half a file. KVANT_ERR_IO: path holds the old file,
 * if there was one. */
KVANT_API kvant_status kvant_index_save(const kvant_index *index, const char *path, char *err,
                                        size_t errlen);

/* Reads an index and verifies its checksum. KVANT_ERR_FORMAT: the file is damaged, cut short or of
 * an unknown version. KVANT_ERR_IO, KVANT_ERR_MEMORY. On an error *index is NULL. */
KVANT_API kvant_status kvant_index_load(const char *path, kvant_index **index, char *err,
                                        size_t errlen);

/* The same without reading the file. The file is mapped, and a page of it is read when a search
 * needs the page. The head and the length are verified now; kvant_index_verify verifies the rest.
 * Nobody may change the file in place while it is open. A new file may replace it by rename. If
 * the file was cut short in place, calls that read it return KVANT_ERR_FORMAT. If that happens
 * during a call, the process gets SIGBUS. */
KVANT_API kvant_status kvant_index_view(const char *path, kvant_index **index, char *err,
                                        size_t errlen);

/* Reads the whole file of a view and compares its checksum: KVANT_OK or KVANT_ERR_FORMAT. KVANT_OK
 * for an index that is no view. */
KVANT_API kvant_status kvant_index_verify(const kvant_index *index);

typedef struct kvant_index_info {
    size_t size; /* set by the caller to sizeof(kvant_index_info) */
    uint32_t dim;
    kvant_metric metric;
    const char *spec; /* canonical; owned by the index */
    uint32_t bits;    /* of one code; 0: a code stands for more than one number */
    int has_center, has_ids, is_view;
    uint64_t n;              /* vectors */
    size_t bytes_per_vector; /* codes and factors, with the padding of dimensions */
    size_t id_bytes;         /* per vector: 0 while the ids are 0 to n - 1, otherwise 8 */
    size_t memory_bytes;     /* of the process, without the mapped bytes of a view */
    size_t file_bytes;       /* the size of the file that kvant_index_save would write */
    uint32_t n_lists;        /* 0: no inverted lists */
    uint64_t next_id;        /* the id that the next vector without a given id gets */
} kvant_index_info;

/* Fills *info, whose size field must be set. */
KVANT_API kvant_status kvant_index_get_info(const kvant_index *index, kvant_index_info *info);

/* ---- On a GPU ---- */

/* A copy of a flat index's codes in the memory of an NVIDIA GPU. It needs libkvant_cuda.so
 * (cuda.h). Codes of trellis and codes of 5 to 7 bits take 8 bits per number there. */
typedef struct kvant_index_gpu kvant_index_gpu;

/* Copies the codes to the calling thread's current GPU. Searches need both the copy and the index,
 * so the index must not change until the copy is freed.
 *
 * KVANT_ERR_UNSUPPORTED: no GPU, no libkvant_cuda.so, or an index with lists=. KVANT_ERR_MEMORY:
 * the host or the GPU has too little memory. KVANT_ERR_CUDA. On an error *gpu is NULL and err, when
 * errlen > 0, holds one line. */
KVANT_API kvant_status kvant_index_gpu_create(const kvant_index *index, kvant_index_gpu **gpu,
                                              char *err, size_t errlen);

/* Frees *gpu and sets it to NULL; a NULL pointer or a pointer to NULL is fine. */
KVANT_API void kvant_index_gpu_free(kvant_index_gpu **gpu);

/* Returns the same results as kvant_index_search, bit for bit. All pointers are host memory. The
 * CPU rounds the queries and reranks, with n_threads threads.
 *
 * Threads: any number may call this at once; the GPU serves one call after another.
 *
 * Memory on the GPU: the first search takes at most 50 MB in addition to the codes, or 200 MB for k
 * above 1024.
 *
 * KVANT_ERR_UNSUPPORTED: k or rerank is above 4096. KVANT_ERR_CUDA. */
KVANT_API kvant_status kvant_index_gpu_search(const kvant_index_gpu *gpu,
                                              const kvant_index_query *query, float *scores,
                                              uint64_t *ids);

KVANT_END_C

#endif /* KVANT_INDEX_H */
