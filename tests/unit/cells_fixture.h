/* cells_fixture.h - a small cache of two kv heads beside a plain copy of what was written to it. */
#ifndef KVANT_TESTS_CELLS_FIXTURE_H
#define KVANT_TESTS_CELLS_FIXTURE_H

#include "testing.h"

#include <kvant/cache.h>

#include "../../src/cache/cells.h"

typedef struct fixture {
    kvant_codec *codec;
    kvant_cells_config config;
    kvant_cells *cells;
    void *memory;
    uint32_t d, width;
    float *rows; /* what was written last to every cell */
} fixture;

static inline fixture make(const char *spec, uint32_t n_streams, uint32_t n_cells, uint32_t n_open)
{
    fixture f = { .codec = make_codec(spec, 32, KVANT_ROLE_K), .d = 32, .width = 64 };
    f.config = (kvant_cells_config){ .size = sizeof f.config,
                                     .codec = f.codec,
                                     .n_kv_heads = 2,
                                     .n_streams = n_streams,
                                     .n_cells = n_cells,
                                     .n_open_groups = n_open };
    f.memory = aligned(kvant_cells_bytes(&f.config));
    assert_int_equal(kvant_cells_create(&f.config, f.memory, &f.cells), KVANT_OK);
    f.rows = calloc((size_t)n_streams * n_cells * f.width, sizeof *f.rows);
    return f;
}

static inline void drop(fixture *f)
{
    kvant_cells_free(&f->cells);
    kvant_codec_free(&f->codec);
    free(f->memory);
    free(f->rows);
}

/* Numbers that fp16 holds exactly, so that with rotate=none open pages hold the rows themselves. */
static inline float half_number(uint64_t *rng)
{
    return (float)((int)(test_random(rng) % 2049) - 1024) / 256;
}

static inline void write_range(fixture *f, uint32_t first, uint32_t n, uint32_t batch, uint32_t n_threads,
                               uint64_t *rng)
{
    int64_t *index = malloc(n * sizeof *index);
    for (uint32_t i = 0; i < n; i++)
        index[i] = first + i;
    for (size_t j = 0; j < (size_t)n * f->width; j++)
        f->rows[(size_t)first * f->width + j] = half_number(rng);
    for (uint32_t i = 0; i < n; i += batch)
        assert_int_equal(kvant_cells_write(f->cells, index + i, n - i < batch ? n - i : batch,
                                           f->rows + (size_t)(first + i) * f->width, f->width, n_threads),
                         KVANT_OK);
    free(index);
}

static inline bool is_open(const fixture *f, uint32_t stream, uint32_t page)
{
    return kvant_cells_page(f->cells, stream, page, 0).codec != f->codec;
}

static inline void read_cell(const fixture *f, uint32_t cell, float *row)
{
    assert_int_equal(kvant_cells_read(f->cells, cell, 1, row, f->width), KVANT_OK);
}

/* What a per-token codec makes of a row. */
static inline void through_codec(const fixture *f, const float *row, float *out)
{
    void *page = aligned(info_of(f->codec).page_bytes);
    for (uint32_t h = 0; h < f->config.n_kv_heads; h++) {
        assert_int_equal(kvant_codec_encode(f->codec, NULL, row + h * f->d, f->d, 0, 1, page), KVANT_OK);
        assert_int_equal(kvant_codec_decode(f->codec, NULL, page, 0, 1, out + h * f->d, 0), KVANT_OK);
    }
    free(page);
}

/* Cells of open pages are exact, those of sealed ones what the codec makes of them. */
static inline void check_cells(const fixture *f, uint32_t stream, uint32_t n)
{
    float got[64], want[64];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t cell = stream * f->config.n_cells + i;
        const float *row = f->rows + (size_t)cell * f->width;
        read_cell(f, cell, got);
        if (is_open(f, stream, i / 64))
            assert_memory_equal(got, row, sizeof got);
        else {
            through_codec(f, row, want);
            assert_memory_equal(got, want, sizeof got);
        }
    }
}

#endif
