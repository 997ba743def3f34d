/* test_trace.c - the plug-in's trace (KVANT_TRACE): the lines of every kind, and files that cannot
 * be written. Expected lines are written out by hand from trace.h. */
#include <unistd.h>

#include "../cases.h"
#include "../../integrations/llama.cpp/trace.h"

enum { N_CELLS = 256, ROW = 8, SEEN = 0, HIDDEN = 0xfc00 };

static char path[] = "/tmp/kvant_trace_XXXXXX";
static long read_so_far;

/* Keys and values of two caches: one stream, two streams. */
static kvp_kv keys[2], values[2], later_keys;

static void create(void)
{
    for (uint32_t i = 0; i < 2; i++) {
        keys[i] = (kvp_kv){
            .cache = &keys[i],
            .shape = { .role = KVANT_ROLE_K, .row = ROW, .n_cells = N_CELLS, .n_streams = i + 1 }
        };
        values[i] = keys[i];
        values[i].shape.role = KVANT_ROLE_V;
    }
    later_keys = keys[0];
}

/* The file has these lines since the last call. */
static void expect(const char *lines)
{
    char found[4096] = "";
    FILE *file = fopen(path, "r");
    size_t n;

    assert_non_null(file);
    fseek(file, read_so_far, SEEK_SET);
    n = fread(found, 1, sizeof(found) - 1, file);
    found[n] = '\0';
    read_so_far = ftell(file);
    fclose(file);
    assert_string_equal(found, lines);
}

static void attend(const kvp_kv *kv, size_t stream, uint32_t n_kv, uint32_t n_queries,
                   const uint16_t *mask)
{
    const kvant_attention_problem problem = {
        .n_tokens = n_kv, .n_queries = n_queries, .mask = mask, .mask_token_stride = n_kv
    };

    kvp_trace_attention(kv, stream, &problem);
}

/* No file is written, one line is printed, and the next calls do nothing. */
CASE(unwritable)
{
    const int64_t cell = 3;

    kvp_trace_open();
    assert_false(kvp_trace_is_on);
    setenv("KVANT_TRACE", "/nonexistent/trace", 1);
    kvp_trace_open();
    assert_false(kvp_trace_is_on);
    if (access("/dev/full", W_OK) == 0) {
        setenv("KVANT_TRACE", "/dev/full", 1);
        kvp_trace_open();
        kvp_trace_rows(&keys[0], &cell, 1, NULL);
        attend(&keys[0], 0, 64, 1, NULL);
        kvp_trace_close(&keys[0]);
    }
    setenv("KVANT_TRACE", path, 1);
    kvp_trace_open();
    assert_true(kvp_trace_is_on);
    expect("kvant-trace 1\n");
}

/* The second graph writes two runs of cells, and each of its queries sees one cell. Only the first
 * tensor of keys counts. */
CASE(graphs)
{
    const int64_t first[3] = { 0, 1, 2 }, second[4] = { 7, 8, 100, 101 };
    const int32_t positions[4] = { 3, 4, 9, 9 };
    uint16_t mask[2 * N_CELLS];

    kvp_trace_rows(&keys[0], first, 3, NULL);
    kvp_trace_rows(&values[0], first, 3, NULL);
    attend(&keys[0], 0, 64, 3, NULL);
    kvp_trace_rows(&later_keys, first, 3, NULL);
    attend(&later_keys, 0, 64, 3, NULL);
    expect("o 1 0 1 256 - - -\ns 1 1 0 64 0+3 - 0+64\n");
    memset(mask, 0xff, sizeof(mask));
    for (size_t i = 0; i < 2 * N_CELLS; i++)
        mask[i] = HIDDEN;
    mask[127] = mask[N_CELLS + 192] = SEEN;
    kvp_trace_rows(&keys[0], second, 4, positions);
    attend(&keys[0], 0, N_CELLS, 2, mask);
    expect("s 1 2 0 256 7+2,100+2 3+2,9*2 127+1,192+1\n");
}

/* A graph for two streams has a line for each. Rows without an attention node have a line, too. */
CASE(streams)
{
    const int64_t cells[3] = { 5, N_CELLS + 70, 6 };
    const int32_t positions[3] = { 5, 70, 6 };

    kvp_trace_rows(&keys[1], cells, 3, positions);
    attend(&keys[1], 0, 128, 1, NULL);
    attend(&keys[1], 1, 128, 1, NULL);
    expect("o 2 0 2 256 - - -\ns 2 1 0 128 5+2 5+2 0+128\ns 2 1 1 128 70+1 70+1 0+128\n");
    kvp_trace_rows(&keys[1], cells, 3, positions);
    kvp_trace_clear(&keys[1]);
    expect("s 2 2 0 0 5+2 5+2 -\ns 2 2 1 0 70+1 70+1 -\nz 2 2 0 0 - - -\n");
}

/* Rows that are restored one by one become one line per stream. */
CASE(outside)
{
    const size_t row = ROW * sizeof(uint16_t);

    kvp_trace_write(&keys[1], 3 * row, row);
    kvp_trace_write(&values[1], 3 * row, row);
    kvp_trace_write(&keys[1], 4 * row, 2 * row);
    kvp_trace_write(&keys[1], (N_CELLS + 9) * row, 1); /* a part of a row */
    expect("");
    kvp_trace_copy(&keys[1], 0, &keys[1], 1);
    expect("w 2 2 0 0 3+3 - -\nw 2 2 1 0 9+1 - -\np 2 2 1 0 - - -\n");
    kvp_trace_copy(&keys[0], 0, &keys[1], 1); /* to a tensor of another cache */
    kvp_trace_clear(&keys[1]);
    expect("w 2 2 1 0 0+256 - -\nz 2 2 0 0 - - -\n");
}

CASE(shift_and_end)
{
    int32_t by[2 * N_CELLS] = { 0 };

    by[10] = by[11] = by[12] = -7;
    by[N_CELLS + 1] = 2;
    kvp_trace_shift(&keys[1], by, 2 * N_CELLS);
    expect("k 2 2 0 0 10+3 -7*3 -\nk 2 2 1 0 1+1 2+1 -\n");
    kvp_trace_close(&keys[1]);
    kvp_trace_close(&keys[1]);
    expect("x 2 2 0 0 - - -\n");
}

static int start(void **state)
{
    const int file = mkstemp(path);

    unsetenv("KVANT_TRACE");
    create();
    return file < 0 ? -1 : close(file);
}

static int stop(void **state)
{
    return unlink(path);
}

RUN_CASES(start, stop)
