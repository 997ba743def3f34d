/* calibration.h - statistics of a model's keys, values and queries, gathered once and kept in a file (docs/calibration.md).
 *
 * Most codecs need none. center=file and norm=file take a mean and a range per channel, transform=file and transform=diagonal a
 * weighting of directions, kmeans takes centroids, hessian takes the second moment of the queries: kvant_codec_create_calibrated copies
 * what its layer and kv head need from here.
 *
 * A kvant_calibration is immutable: any number of threads may read it. A kvant_calibrator gathers one; it belongs to one
 * thread at a time. `kvant calibrate` is the calibrator behind llama.cpp.
 */
#ifndef KVANT_CALIBRATION_H
#define KVANT_CALIBRATION_H

#include <kvant/codec.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVANT_CALIBRATION_MAX_CODEBOOKS 8u   /* sets of centroids in one file */
#define KVANT_CALIBRATION_MAX_CLUSTERS 4096u /* centroids of one set */

typedef struct kvant_calibration_info {
    size_t size;                /* set by the caller to sizeof(kvant_calibration_info) */
    const char *model;          /* the name the calibrator was given; owned by the calibration */
    uint64_t model_fingerprint; /* likewise; 0 when there was none */
    uint32_t n_layers;          /* the highest layer with an entry, plus one */
    uint32_t n_kv_heads;        /* of the layer with most */
    uint32_t head_dim;          /* the largest of all layers, keys and values */
    uint64_t n_tokens;          /* rows seen by the layer that saw most */
    uint64_t seed;              /* of sampling and of k-means */
    uint32_t n_codebooks;       /* sets of centroids, in increasing order of their number of clusters */
    uint32_t clusters[KVANT_CALIBRATION_MAX_CODEBOOKS];
    size_t bytes;      /* size of the file */
    uint64_t checksum; /* of the file: tells calibrations apart */
} kvant_calibration_info;

/* What is known of one kv head of one layer. Pointers are into the calibration and live as long as it does. */
typedef struct kvant_calibration_entry {
    size_t size; /* set by the caller to sizeof(kvant_calibration_entry) */
    uint32_t head_dim;
    const float *mean; /* head_dim numbers: of the rows as the engine caches them (keys after RoPE) */
    const float *min;  /* head_dim numbers */
    const float *max;
    /* head_dim x head_dim, row-major and symmetric: E[q q^T] over the queries of the heads that share this kv head, after
     * RoPE and without the attention scale. Keys only, else NULL. */
    const float *query_moment;
    /* What transform=diagonal and transform=file multiply centred keys by (docs/calibration.md). Keys only, else NULL. */
    const float *diagonal; /* head_dim factors above 0 */
    const uint16_t *
        matrix; /* the lower triangle of a symmetric matrix, row by row, head_dim (head_dim + 1) / 2 binary16 numbers */
    const float *centroids[KVANT_CALIBRATION_MAX_CODEBOOKS]; /* set i: clusters[i] x head_dim numbers */
} kvant_calibration_entry;

/* Reads a file whole. On error *calibration is NULL and err, when errlen > 0, holds one line. KVANT_ERR_FORMAT when the file
 * is damaged, cut short or of a version this library does not know; KVANT_ERR_IO when it cannot be read; KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_calibration_load(const char *path, kvant_calibration **calibration, char *err,
                                              size_t errlen);

/* Writes a file: a temporary one beside path, flushed to disk, then renamed, so that path never holds half of one.
 * KVANT_ERR_IO when that fails; the old file, if any, is then still there. */
KVANT_API kvant_status kvant_calibration_save(const kvant_calibration *calibration, const char *path, char *err,
                                              size_t errlen);

/* Frees *calibration and sets it to NULL; NULL and a pointer to NULL are fine. */
KVANT_API void kvant_calibration_free(kvant_calibration **calibration);

/* Fills *info, whose size field must be set. */
KVANT_API kvant_status kvant_calibration_get_info(const kvant_calibration *calibration,
                                                  kvant_calibration_info *info);

/* Fills *entry, whose size field must be set. KVANT_ERR_ARGUMENT when there is none for this layer, kv head and role. */
KVANT_API kvant_status kvant_calibration_get_entry(const kvant_calibration *calibration, uint32_t layer,
                                                   uint32_t kv_head, kvant_role role,
                                                   kvant_calibration_entry *entry);

typedef struct kvant_calibrator kvant_calibrator;

typedef struct kvant_calibrator_config {
    size_t size;       /* set by the caller to sizeof(kvant_calibrator_config) */
    const char *model; /* up to 255 bytes of UTF-8, copied; NULL: "" */
    uint64_t model_fingerprint;
    uint64_t seed;
    const uint32_t *clusters; /* n_codebooks different numbers, 2 .. KVANT_CALIBRATION_MAX_CLUSTERS, increasing */
    uint32_t n_codebooks;     /* 0: no k-means, and no rows are kept for it */
    uint32_t sample_rows;     /* rows kept a layer and role for k-means; 0: 8 for each cluster of the largest set */
    uint32_t n_threads;       /* for k-means; 0: 1 */
} kvant_calibrator_config;

/* KVANT_ERR_ARGUMENT with a line in err when the configuration is not valid, or KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_calibrator_create(const kvant_calibrator_config *config, kvant_calibrator **calibrator,
                                               char *err, size_t errlen);
KVANT_API void kvant_calibrator_free(kvant_calibrator **calibrator);

/* Adds n rows of all kv heads of a layer (n_kv_heads x head_dim floats, row i at rows + i * stride), as the engine caches
 * them. The first call for a layer and role fixes its shape. Sums are kept in binary64, so the order of calls matters only
 * in their last bits, but the sample for k-means depends on it. KVANT_ERR_NONFINITE leaves everything as it was. */
KVANT_API kvant_status kvant_calibrator_add_rows(kvant_calibrator *calibrator, uint32_t layer, kvant_role role,
                                                 uint32_t n_kv_heads, uint32_t head_dim, const float *rows,
                                                 size_t stride, size_t n);

/* Adds n queries of one query head, which belongs to the given kv head: head_dim floats each, query i at queries + i *
 * stride. Keys of the layer must have been added before. */
KVANT_API kvant_status kvant_calibrator_add_queries(kvant_calibrator *calibrator, uint32_t layer, uint32_t kv_head,
                                                    uint32_t head_dim, const float *queries, size_t stride,
                                                    size_t n);

/* Queries of the heads that share a kv head, and the keys they meet. */
typedef struct kvant_calibrator_attention {
    size_t size;       /* set by the caller to sizeof(kvant_calibrator_attention) */
    const float *keys; /* n_keys x head_dim, as the engine caches them, key i at keys + i * key_stride */
    size_t key_stride;
    uint32_t n_keys;
    const float *queries; /* n_queries x head_dim, likewise */
    size_t query_stride;
    uint32_t n_queries;
    const float *
        mask; /* added to scores: query i, key j at mask + i * mask_stride + j; -INFINITY hides. NULL: all are seen */
    size_t mask_stride;
    float scale; /* that attention multiplies <q, k> by */
} kvant_calibrator_attention;

/* Adds attention of some queries (a hundred of each text do), from which keys learn how much they count. The first n_exact keys count
 * for nothing: a cache keeps them in 16 bits. Without such calls all keys count alike, which serves transform= nearly as well. Keys of
 * the layer must have been added before. KVANT_ERR_NONFINITE and KVANT_ERR_MEMORY leave everything as it was. */
KVANT_API kvant_status kvant_calibrator_add_attention(kvant_calibrator *calibrator, uint32_t layer,
                                                      uint32_t kv_head, uint32_t head_dim, uint32_t n_exact,
                                                      const kvant_calibrator_attention *attention);

/* Clusters the rows of one more layer, the long part of the work: call it until *left, the number of layers still to do, is
 * 0. In between the caller may report progress or give up. KVANT_ERR_ARGUMENT when fewer rows were added than there are
 * clusters. The result does not depend on n_threads. */
KVANT_API kvant_status kvant_calibrator_cluster(kvant_calibrator *calibrator, uint32_t *left);

/* Keeps what was gathered so far in a file, to go on after a break: written beside path and renamed. key stands for the work (a hash of
 * the text, say), position for how far it came; the library only keeps them. KVANT_ERR_IO, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_calibrator_save(const kvant_calibrator *calibrator, uint64_t key, uint64_t position,
                                             const char *path, char *err, size_t errlen);

/* Goes on from such a file with a calibrator just created, and tells *position. KVANT_ERR_ARGUMENT when the file is of another key or
 * configuration, KVANT_ERR_FORMAT when it is damaged or of another version of the library, KVANT_ERR_IO when it cannot be read;
 * the calibrator is then as it was. */
KVANT_API kvant_status kvant_calibrator_restore(kvant_calibrator *calibrator, uint64_t key, const char *path,
                                                uint64_t *position, char *err, size_t errlen);

/* Makes the calibration. KVANT_ERR_ARGUMENT when nothing was added or clustering is not done. */
KVANT_API kvant_status kvant_calibrator_finish(const kvant_calibrator *calibrator, kvant_calibration **calibration);

#ifdef __cplusplus
}
#endif

#endif /* KVANT_CALIBRATION_H */
