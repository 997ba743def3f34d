/* cache.h - the compressed cache of one layer and one role, addressed by cell, for engines that manage cells.
 *
 * Cells are numbered slots for tokens, as in llama.cpp: any cell may be written at any time and in any order.
 * A kvant_cells holds n_streams x n_cells of them, each with n_kv_heads rows of head_dim numbers, in pages of 64
 * neighbouring cells; the pages of the kv heads of 64 cells lie side by side.
 *
 * A page group (the pages of all kv heads of 64 cells) is sealed (compressed) or open (fp16). What the codec's spec
 * asks for (kvant_codec_info) decides which:
 *
 *   sink_tokens     groups that hold one of the first sink_tokens cells of a stream are never sealed: whole pages,
 *                   so sink=4 keeps 64 cells
 *   recent_tokens   rows pass through open groups; a group is sealed when all of its cells are written and
 *                   recent_tokens rows were written to its stream after the last of them
 *   block_tokens    above 1 rows pass through open groups too, and a group is sealed when it is full
 *   otherwise       rows are encoded straight into sealed pages
 *
 * Recency goes by the order of writing. Open groups come from a pool; when it is used up, the group that was not
 * written for longest is sealed early, those outside of their stream's recent window first.
 *
 * Writing to a cell of a sealed group: where rows are encoded straight into pages, the cell alone changes. Else
 * the group is opened again; when it is sealed, only blocks with rewritten cells are encoded, and all other bytes
 * are as they were.
 *
 * Centre and factors (kvant_affine) belong to the cache. With center=first or norm=first they are computed from the
 * first rows written: from all rows of the first call of kvant_cells_write when it has at least 64, else from the
 * first 64 rows, which wait in open groups until then (from fewer when the pool is used up before). The centre is
 * their mean; a factor is the square root of a channel's largest distance from the centre, at least 1/256 of the
 * head's largest factor. From then on they are fixed until kvant_cells_clear.
 *
 * Codecs of kv heads may be of different specs and sizes. They must agree in role and head_dim and, because a group is open or
 * sealed for all kv heads at once, in sink_tokens, recent_tokens and block_tokens; and first rows give all of them a
 * centre (or factors), or none.
 *
 * The memory is the caller's: one block, so that an engine's own allocator and accounting see it. Pages of
 * cells that were never written are never touched, so lazily zeroed memory stays unused until then.
 *
 * Not thread-safe for writes: one writer at a time, and no reader beside it. Readers may run in parallel.
 */
#ifndef KVANT_CACHE_H
#define KVANT_CACHE_H

#include <kvant/codec.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvant_cells kvant_cells;

typedef struct kvant_cells_config {
    size_t size;              /* set by the caller to sizeof(kvant_cells_config) */
    const kvant_codec *codec; /* must outlive the cells; may be NULL when codecs is not */
    const kvant_codec *const
        *codecs; /* NULL, or a codec for each kv head, which fit together as above; the array is copied */
    uint32_t n_kv_heads;
    uint32_t n_streams;     /* independent ranges of cells; 1 for a single sequence or a unified cache */
    uint32_t n_cells;       /* cells of one stream; pages are padded to whole ones */
    uint32_t n_open_groups; /* fp16 page groups in the pool, sinks not counted; 0 lets the library choose */
} kvant_cells_config;

/* Bytes of memory that the cells of this configuration need, or 0 when it is not valid, such as codecs that do not fit together. */
KVANT_API size_t kvant_cells_bytes(const kvant_cells_config *config);

/* Creates the cells in memory (kvant_cells_bytes bytes, aligned to KVANT_PAGE_ALIGN, zeroed), which stays the
 * caller's and must outlive them. KVANT_ERR_UNSUPPORTED when the spec says center=file or norm=file and the codecs
 * were created without a calibration that holds them. */
KVANT_API kvant_status kvant_cells_create(const kvant_cells_config *config, void *memory, kvant_cells **cells);

/* Frees the bookkeeping, not the memory; sets *cells to NULL. */
KVANT_API void kvant_cells_free(kvant_cells **cells);

/* Writes n rows (all kv heads of one token each: n_kv_heads x head_dim floats, row i at rows + i * stride) into
 * cells index[i] (0 .. n_streams * n_cells - 1, stream major; later entries win over earlier ones).
 * n_threads >= 1 bounds the threads used. On an error rows before the offending one may have been written;
 * the offending row of a kv head never is. */
KVANT_API kvant_status kvant_cells_write(kvant_cells *cells, const int64_t *index, size_t n, const float *rows,
                                         size_t stride, uint32_t n_threads);

/* Reads n cells from first on (numbered as for write, not across the end of a stream's padding) into rows. */
KVANT_API kvant_status kvant_cells_read(const kvant_cells *cells, size_t first, size_t n, float *rows,
                                        size_t stride);

/* All cells become zero (never written); centre and factors are as after creation. Touches only memory that was
 * written. */
KVANT_API void kvant_cells_clear(kvant_cells *cells);

/* Copies a stream, compressed bytes as they are, between cells of equal codecs and shape (or within one). The target
 * takes over the centre and factors; KVANT_ERR_ARGUMENT when it has others and cells that depend on them,
 * KVANT_ERR_FULL when rows that wait for them do not fit the target's pool. Copy by reading and writing then. */
KVANT_API kvant_status kvant_cells_copy_stream(const kvant_cells *from, uint32_t from_stream, kvant_cells *to,
                                               uint32_t to_stream);

/* Centre and factors in force: members of n_kv_heads x head_dim floats, NULL while there is none. An engine that saves
 * and restores rows keeps them beside the rows. They can be set only while no cell is written (KVANT_ERR_ARGUMENT
 * later: codes depend on them), and nothing is computed from first rows then; the arrays are copied.
 * KVANT_ERR_NONFINITE for numbers that are not finite, KVANT_ERR_ARGUMENT for factors not above 0. */
KVANT_API kvant_affine kvant_cells_affine(const kvant_cells *cells);
KVANT_API kvant_status kvant_cells_set_affine(kvant_cells *cells, const kvant_affine *affine);

/* The page of one kv head that holds a cell, and the codec that wrote it (the fp16 one while the group is
 * open). For attention, inspection and transfer; valid until the next write. */
typedef struct kvant_page_ref {
    const kvant_codec *codec;
    const void *page;
} kvant_page_ref;

KVANT_API kvant_page_ref kvant_cells_page(const kvant_cells *cells, uint32_t stream, uint32_t page,
                                          uint32_t kv_head);

/* The configuration in force (n_open_groups resolved). */
KVANT_API kvant_cells_config kvant_cells_get_config(const kvant_cells *cells);

#ifdef __cplusplus
}
#endif

#endif /* KVANT_CACHE_H */
