/* calibration.h - statistics of a model's keys, values and queries, gathered once and kept in a
 * file (calibration.md).
 *
 * Most codecs need no calibration. Some parts of a spec take numbers from it:
 *
 *   center=file, norm=file                   mean and range per channel
 *   transform=file, transform=diagonal       a weighting of directions
 *   kmeans                                   centroids
 *   hessian                                  the second moment of the queries
 *
 * kvant_codec_create_calibrated copies the numbers of its layer and kv head.
 *
 * A kvant_calibrator gathers a calibration; `kvant calibrate` drives one with llama.cpp.
 *
 * Threads: a kvant_calibration never changes, so any number of threads may read it. One thread at a
 * time may use a kvant_calibrator, but different threads may add queries and attention of different
 * kv heads at once.
 */
#ifndef KVANT_CALIBRATION_H
#define KVANT_CALIBRATION_H

#include <kvant/codec.h>

KVANT_BEGIN_C

#define KVANT_CALIBRATION_MAX_CODEBOOKS 8u   /* sets of centroids in one file */
#define KVANT_CALIBRATION_MAX_CLUSTERS 4096u /* centroids of one set */

typedef struct kvant_calibration_info {
    size_t size;                /* set by the caller to sizeof(kvant_calibration_info) */
    const char *model;          /* as in kvant_calibrator_config; owned by the calibration */
    uint64_t model_fingerprint; /* as in kvant_calibrator_config; 0: none */
    uint32_t n_layers;          /* the highest layer with an entry, plus 1 */
    uint32_t n_kv_heads;        /* the largest of all layers */
    uint32_t head_dim;          /* the largest of all layers, keys and values */
    uint64_t n_tokens;          /* rows per kv head, the largest of all layers */
    uint64_t seed;              /* of sampling and of k-means */
    uint32_t n_codebooks;       /* sets of centroids, in increasing order of clusters */
    uint32_t clusters[KVANT_CALIBRATION_MAX_CODEBOOKS];
    size_t bytes;      /* size of the file */
    uint64_t checksum; /* of the file: tells calibrations apart */
} kvant_calibration_info;

/* The statistics of one (layer, kv head, role). The calibration owns the arrays. */
typedef struct kvant_calibration_entry {
    size_t size; /* set by the caller to sizeof(kvant_calibration_entry) */
    uint32_t head_dim;
    /* head_dim numbers each, per channel. The rows are as the engine caches them (keys after
     * RoPE). */
    const float *mean;
    const float *min;
    const float *max;
    /* head_dim x head_dim, row-major and symmetric: E[q q^T] over the queries of the heads that
     * share this kv head, after RoPE and without the attention scale. Keys only, otherwise NULL. */
    const float *query_moment;
    /* Factors of centred keys for transform=diagonal and transform=file (calibration.md). Keys
     * only, otherwise NULL. diagonal: head_dim numbers above 0. matrix: the lower triangle of a
     * symmetric matrix, row by row, head_dim (head_dim + 1) / 2 binary16 numbers. */
    const float *diagonal;
    const uint16_t *matrix;
    /* Set i has clusters[i] x head_dim numbers. */
    const float *centroids[KVANT_CALIBRATION_MAX_CODEBOOKS];
} kvant_calibration_entry;

/* Reads a calibration file.
 * KVANT_ERR_FORMAT: the file is damaged, cut short or of an unknown version. KVANT_ERR_IO: the file
 * cannot be read. KVANT_ERR_MEMORY. On an error *calibration is NULL and err, when errlen > 0,
 * holds one line. */
KVANT_API kvant_status kvant_calibration_load(const char *path, kvant_calibration **calibration,
                                              char *err, size_t errlen);

/* Writes a calibration file. The function writes a temporary file in the folder of path, flushes it
 * to disk and renames it to path. So path never holds half a file. After KVANT_ERR_IO it holds the
 * old file, if there was one. */
KVANT_API kvant_status kvant_calibration_save(const kvant_calibration *calibration,
                                              const char *path, char *err, size_t errlen);

/* Frees *calibration and sets it to NULL; NULL and a pointer to NULL are fine. */
KVANT_API void kvant_calibration_free(kvant_calibration **calibration);

/* Fills *info, whose size field must be set. */
KVANT_API kvant_status kvant_calibration_get_info(const kvant_calibration *calibration,
                                                  kvant_calibration_info *info);

/* Fills *entry, whose size field must be set. KVANT_ERR_ARGUMENT: there is no entry for this layer,
 * kv head and role. */
KVANT_API kvant_status kvant_calibration_get_entry(const kvant_calibration *calibration,
                                                   uint32_t layer, uint32_t kv_head,
                                                   kvant_role role, kvant_calibration_entry *entry);

/* Returns a fingerprint of a model's file, for model_fingerprint. It is a hash of the file's size
 * and of 256 blocks of 4 KiB that are spread over the file. So it takes only a moment. It is 0 when
 * the file cannot be read. The fingerprint tells files apart; it does not protect against forged
 * files. */
KVANT_API uint64_t kvant_model_fingerprint(const char *path);

typedef struct kvant_calibrator kvant_calibrator;

typedef struct kvant_calibrator_config {
    size_t size;                /* set by the caller to sizeof(kvant_calibrator_config) */
    const char *model;          /* at most 255 bytes of UTF-8, copied; NULL: "" */
    uint64_t model_fingerprint; /* kvant_model_fingerprint, or 0: none */
    uint64_t seed;
    /* n_codebooks increasing numbers, from 2 to KVANT_CALIBRATION_MAX_CLUSTERS. */
    const uint32_t *clusters;
    uint32_t n_codebooks; /* 0: no k-means, and no rows are kept for it */
    uint32_t sample_rows; /* rows kept per (layer, role); 0: 8 per cluster of the largest set */
    uint32_t n_threads;   /* for rows and k-means; 0: 1 */
} kvant_calibrator_config;

/* Creates a calibrator. KVANT_ERR_ARGUMENT with one line in err: the configuration is not valid.
 * KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_calibrator_create(const kvant_calibrator_config *config,
                                               kvant_calibrator **calibrator, char *err,
                                               size_t errlen);
KVANT_API void kvant_calibrator_free(kvant_calibrator **calibrator);

/* Adds n rows of a layer, as the engine caches them: n_kv_heads x head_dim floats each, row i at
 * rows + i * stride. The first call for a (layer, role) fixes its shape. Sums are kept in binary64,
 * so the order of calls changes only their last bits; the sample for k-means depends on the order.
 * KVANT_ERR_NONFINITE, KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY. On KVANT_ERR_NONFINITE nothing was
 * added. */
KVANT_API kvant_status kvant_calibrator_add_rows(kvant_calibrator *calibrator, uint32_t layer,
                                                 kvant_role role, uint32_t n_kv_heads,
                                                 uint32_t head_dim, const float *rows,
                                                 size_t stride, size_t n);

/* Adds n queries of one query head that reads kv_head: head_dim floats each, query i at queries + i
 * * stride. kvant_calibrator_add_rows must have seen keys of this layer before (KVANT_ERR_ARGUMENT
 * if not). KVANT_ERR_NONFINITE: nothing was added. */
KVANT_API kvant_status kvant_calibrator_add_queries(kvant_calibrator *calibrator, uint32_t layer,
                                                    uint32_t kv_head, uint32_t head_dim,
                                                    const float *queries, size_t stride, size_t n);

/* Queries of the heads that share a kv head, and the keys that these queries see. */
typedef struct kvant_calibrator_attention {
    size_t size; /* set by the caller to sizeof(kvant_calibrator_attention) */
    /* n_keys x head_dim, as the engine caches them; key i is at keys + i * key_stride. */
    const float *keys;
    size_t key_stride; /* in floats, like all strides */
    uint32_t n_keys;
    const float *queries; /* n_queries x head_dim; query i at queries + i * query_stride */
    size_t query_stride;
    uint32_t n_queries;
    /* The mask is added to the scores: query i and key j have the number mask[i * mask_stride + j].
     * -INFINITY hides the key. NULL: every query sees every key. */
    const float *mask;
    size_t mask_stride;
    float scale; /* attention's factor of <q, k> */
} kvant_calibrator_attention;

/* Adds the attention weights of some queries; about 100 queries per text are enough. The weights
 * say how much each key counts in the matrices of transform=. The first n_exact keys count 0,
 * because a cache keeps them as fp16. Without such calls all keys count alike, which serves
 * transform= nearly as well. kvant_calibrator_add_rows must have seen keys of this layer before.
 * KVANT_ERR_NONFINITE, KVANT_ERR_MEMORY: nothing was added. */
KVANT_API kvant_status kvant_calibrator_add_attention(kvant_calibrator *calibrator, uint32_t layer,
                                                      uint32_t kv_head, uint32_t head_dim,
                                                      uint32_t n_exact,
                                                      const kvant_calibrator_attention *attention);

/* Sums over rows that the caller computed, for example on a GPU. They replace the three calls
 * above. A statistic that is NULL or 0 is left out. */
typedef struct kvant_calibrator_moments {
    size_t size; /* set by the caller to sizeof(kvant_calibrator_moments) */
    uint32_t n_kv_heads, head_dim;
    uint64_t n_rows;        /* more than 0 */
    const double *sum;      /* of the rows, per channel: n_kv_heads x head_dim; needed */
    const float *min, *max; /* per channel: n_kv_heads x head_dim; needed */
    const float *rows;      /* as for add_rows; needed where there are clusters, for their sample */
    size_t stride;
    /* The following members are for keys only. A sum of outer products is n_kv_heads x head_dim x
     * head_dim; only its lower triangles are read. */
    const double *spread; /* sum of x x^T over keys; needed */
    const double *moment; /* sum of q q^T over the queries of all heads that share the kv head */
    uint64_t n_queries;   /* per kv head */
    /* A key has the weight w = sum over queries of p (1 - p), where p is the attention weight. */
    const double *attended; /* sum of w x x^T over keys */
    /* Sum of w x, n_kv_heads x head_dim; sum of w, n_kv_heads. */
    const double *attended_sum, *attended_weight;
} kvant_calibrator_moments;

/* Adds sums that the caller computed. KVANT_ERR_NONFINITE: nothing was added. */
KVANT_API kvant_status kvant_calibrator_add_moments(kvant_calibrator *calibrator, uint32_t layer,
                                                    kvant_role role,
                                                    const kvant_calibrator_moments *sums);

/* Runs k-means on one more layer and sets *left = the number of layers still to do. Call it until
 * *left is 0; this is the long part of the work. Between calls the caller may report progress or
 * stop. The result does not depend on n_threads. KVANT_ERR_ARGUMENT: fewer rows were added than
 * there are clusters. */
KVANT_API kvant_status kvant_calibrator_cluster(kvant_calibrator *calibrator, uint32_t *left);

/* Saves the state of the calibrator, so that kvant_calibrator_restore can continue after a break.
 * The file is written under a temporary name in the folder of path and then renamed. The caller's
 * key identifies the work (for example a hash of the text), and position says how far the work is;
 * the library only stores both. KVANT_ERR_IO, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_calibrator_save(const kvant_calibrator *calibrator, uint64_t key,
                                             uint64_t position, const char *path, char *err,
                                             size_t errlen);

/* Restores a saved state into a calibrator just created, and sets *position.
 * KVANT_ERR_ARGUMENT: the file has another key or configuration. KVANT_ERR_FORMAT: the file is
 * damaged or of another version of the library. KVANT_ERR_IO: the file cannot be read. On an error
 * the calibrator is unchanged. */
KVANT_API kvant_status kvant_calibrator_restore(kvant_calibrator *calibrator, uint64_t key,
                                                const char *path, uint64_t *position, char *err,
                                                size_t errlen);

/* Makes the calibration. KVANT_ERR_ARGUMENT: nothing was added, or kvant_calibrator_cluster is not
 * done. */
KVANT_API kvant_status kvant_calibrator_finish(const kvant_calibrator *calibrator,
                                               kvant_calibration **calibration);

KVANT_END_C

#endif /* KVANT_CALIBRATION_H */
