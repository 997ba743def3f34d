/* test_transfer.c - blocks that move: copies within and between tensors, export and import, with
 * blocks of every state and transform, and damaged exports. */
#include "attend.h"

#include "../../src/base/fnv.h"

enum { BLOCKS = 8, TOKENS = 400, HEADER = 40, BLOCK_HEADER = 32 };

static const char *const specs[] = { "turboquant-4:center=first,norm=first,recent=64",
                                     "trellis-3:center=first,norm=first",
                                     "int-4:axis=channel,group=32,sink=4",
                                     "int-4:center=first,axis=channel",
                                     PAPERS("octopus-4", ) "int-4:sink=4" };

static void fill_rows(float *rows, uint32_t n, float kind, uint64_t *rng)
{
    for (size_t j = 0; j < (size_t)n * WIDTH; j++)
        rows[j] = test_normal(rng) + kind * (float)(j % 5) - 2;
}

static void write_kind(fixture *f, uint32_t first, uint32_t n, uint32_t batch, float kind,
                       uint64_t *rng)
{
    static float rows[TOKENS * WIDTH];
    fill_rows(rows, n, kind, rng);
    write_rows(f, first, n, rows, batch, 2);
}

/* Two sequences of blocks. The first has a sink where the codec has sinks, and rows of two
 * kinds, which need two transforms. It has a block that was sealed and became exact again, a
 * block that fills, and empty blocks. With `few` it has only rows that are pending until a
 * transform exists. */
static fixture use(const char *spec, kvant_role role, bool few)
{
    uint64_t rng = 80 + role;
    fixture f = make_heads(spec, spec, role, 2, BLOCKS, 0);
    if (few) {
        write_kind(&f, 50, 40, 1, 0, &rng);
        return f;
    }
    write_kind(&f, 0, 200, 200, 0, &rng);
    write_kind(&f, 200, TOKENS - 200, TOKENS - 200, 9, &rng);
    write_kind(&f, 130, 2, 1, 0, &rng);
    return f;
}

/* No row is lost. Rows of kind 0 have sqrt(5) per number. Rows of kind 9 have about 20. Three bits
 * err by a fifth of that, and by more in a block with rows of both kinds. */
static void check_near(const fixture *f, uint32_t first, uint32_t n, const float *rows, bool few)
{
    for (uint32_t i = 0; i < n; i++) {
        float got[WIDTH];
        read_slot(f, first + i, got);
        double error = sqrt(squared_distance(got, rows + (size_t)i * WIDTH, WIDTH) / WIDTH);
        if (!(error < (few ? 1 : 5)))
            fail_msg("slot %u: error %g", first + i, error);
    }
}

static void assert_same_rows(const fixture *f, uint32_t block, const fixture *g, uint32_t other)
{
    float a[WIDTH], b[WIDTH];
    for (uint32_t t = 0; t < 64; t++) {
        read_slot(f, block * 64 + t, a);
        read_slot(g, other * 64 + t, b);
        assert_memory_equal(a, b, sizeof a);
    }
}

static void assert_same_export(const fixture *f, uint32_t block, const fixture *g, uint32_t other)
{
    exported a = export_block(f, block), b = export_block(g, other);
    assert_int_equal(a.bytes, b.bytes);
    assert_memory_equal(a.data, b.data, a.bytes);
    assert_same_rows(f, block, g, other);
    free(a.data);
    free(b.data);
}

/* Compares bits: the same pages and transforms give the same attention. */
static void assert_same_attention(const fixture *k, const fixture *v, const fixture *k2,
                                  const fixture *v2, uint32_t n_tokens, uint32_t first_block)
{
    static attended a, b;
    static float q[2 * N_HEADS * HEAD_DIM];
    uint64_t rng = 5;
    fill_normal(q, COUNT(q), &rng);
    kvant_attention_problem problem = {
        .n_queries = 2, .n_tokens = n_tokens, .causal = true, .scale = 0.1f
    };
    assert_int_equal(attend(k, v, &problem, q, &a), KVANT_OK);
    problem.first_block = first_block;
    assert_int_equal(attend(k2, v2, &problem, q, &b), KVANT_OK);
    assert_memory_equal(a.out, b.out, 2 * N_HEADS * HEAD_DIM * sizeof *a.out);
    assert_memory_equal(a.lse, b.lse, 2 * N_HEADS * sizeof *a.lse);
    assert_true(isfinite(a.out[0]) && isfinite(a.lse[0]));
}

static void import_block(fixture *to, uint32_t target, const fixture *from, uint32_t block)
{
    exported e = export_block(from, block);
    uint8_t *moved = malloc(e.bytes + 1); /* at an odd address */
    memcpy(moved + 1, e.data, e.bytes);
    if (kvant_tensor_import(to->tensor, target, moved + 1, e.bytes) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    free(moved);
    free(e.data);
}

CASE(exported_blocks_are_imported)
{
    for (size_t s = 0; s < COUNT(specs); s++)
        for (int few = 0; few < 2; few++) {
            fixture f[2], g[2];
            for (int role = 0; role < 2; role++) {
                f[role] = use(specs[s], (kvant_role)role, few);
                g[role] = make_like(&f[role]);
                for (int lap = 0; lap < 2; lap++) /* over empty blocks, then over written ones */
                    for (uint32_t block = 0; block < BLOCKS; block++)
                        import_block(&g[role], block, &f[role], block);
                for (uint32_t block = 0; block < BLOCKS; block++) {
                    assert_int_equal(block_of(&f[role], block, 0).state,
                                     block_of(&g[role], block, 0).state);
                    assert_true(block_of(&f[role], block, 0).written ==
                                block_of(&g[role], block, 0).written);
                    assert_same_export(&f[role], block, &g[role], block);
                }
                assert_int_equal(tensor_info_of(&f[role]).n_transforms,
                                 tensor_info_of(&g[role]).n_transforms);
            }
            assert_same_attention(&f[0], &f[1], &g[0], &g[1], few ? 90 : TOKENS, 0);
            /* The tensor continues from there: rows like the imported rows need no new
             * transform. */
            uint64_t rng = 9;
            uint32_t transforms = tensor_info_of(&g[0]).n_transforms;
            write_kind(&g[0], few ? 90 : TOKENS, 80, few ? 80 : 1, few ? 0 : 9, &rng);
            assert_true(tensor_info_of(&g[0]).n_transforms <= transforms + (few ? 1 : 0));
            check_near(&g[0], few ? 90 : TOKENS, 80,
                       g[0].rows + (size_t)(few ? 90 : TOKENS) * WIDTH, few);
            for (int role = 0; role < 2; role++) {
                drop(&g[role]);
                drop(&f[role]);
            }
        }
}

/* Pending rows get the imported transform. */
CASE(imports_end_the_waiting)
{
    const char *spec = "turboquant-4:center=first,norm=first";
    fixture f = use(spec, KVANT_ROLE_K, false), g = make_like(&f);
    uint64_t rng = 81;
    write_kind(&g, BLOCKS * 64 + 100, 20, 1, 0, &rng);
    assert_int_equal(block_of(&g, BLOCKS + 1, 0).transform_id, 0);
    import_block(&g, 1, &f, 1);
    assert_int_not_equal(block_of(&g, BLOCKS + 1, 0).transform_id, 0);
    assert_memory_equal(block_of(&g, BLOCKS + 1, 0).affine.center, block_of(&f, 1, 0).affine.center,
                        HEAD_DIM * sizeof(float));
    /* numbers below 64, rounded to fp16 twice */
    assert_true(error_of(&g, BLOCKS * 64 + 100, 20) < 0.02);
    write_kind(&g, 128, 10, 1, 0, &rng);
    assert_int_equal(tensor_info_of(&g).n_transforms, 2);
    assert_memory_equal(block_of(&g, 2, 1).affine.scale, block_of(&f, 1, 1).affine.scale,
                        HEAD_DIM * sizeof(float));
    drop(&g);
    drop(&f);
}

static void refuse_import(fixture *f, const uint8_t *data, size_t bytes)
{
    kvant_status status = kvant_tensor_import(f->tensor, 1, data, bytes);
    if (status != KVANT_ERR_FORMAT)
        fail_msg("status %d", (int)status);
}

static void *copy_of(const void *data, size_t bytes)
{
    void *copy = malloc(bytes);
    memcpy(copy, data, bytes);
    return copy;
}

CASE(damaged_blocks_are_refused)
{
    for (uint32_t block = 0; block < 7;
         /* a sink; a block that was sealed and became exact; a block sealed with transform 2; a
          * block that fills */
         block += 2) {
        fixture f = use(specs[0], KVANT_ROLE_K, false), g = use(specs[0], KVANT_ROLE_K, false);
        exported e = export_block(&f, block);
        void *before = copy_of(f.memory, f.bytes);
        for (size_t n = 0; n < e.bytes; n++) {
            /* a copy of exactly the needed size, so that a sanitiser sees any access beyond it */
            uint8_t *cut = copy_of(e.data, n ? n : 1);
            refuse_import(&f, cut, n);
            free(cut);
        }
        for (size_t i = 0; i < e.bytes; i++)
            for (int flip = 1; flip < 256; flip += 254) {
                e.data[i] ^= (uint8_t)flip;
                refuse_import(&f, e.data, e.bytes);
                e.data[i] ^= (uint8_t)flip;
            }
        uint8_t *longer = calloc(1, e.bytes + 8);
        memcpy(longer, e.data, e.bytes);
        refuse_import(&f, longer, e.bytes + 8);
        /* any change would stay, so there was none */
        assert_memory_equal(f.memory, before, f.bytes);
        assert_alike(&f, &g);
        assert_int_equal(kvant_tensor_import(f.tensor, 1, e.data, e.bytes), KVANT_OK);
        assert_int_equal(kvant_tensor_import(f.tensor, 2 * BLOCKS, e.data, e.bytes),
                         KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_tensor_import(f.tensor, 1, NULL, e.bytes), KVANT_ERR_ARGUMENT);
        free(longer);
        free(before);
        free(e.data);
        drop(&g);
        drop(&f);
    }
}

/* Blocks that no tensor exports, with the right checksum. */
CASE(hostile_blocks_are_refused)
{
    static const float numbers[] = { NAN, INFINITY, 0, -1 };
    fixture f = use(specs[0], KVANT_ROLE_K, false);
    void *before = copy_of(f.memory, f.bytes);
    const size_t scales = HEADER + WIDTH * sizeof(float),
                 pages = HEADER + 2 * WIDTH * sizeof(float) + BLOCK_HEADER;
    for (size_t i = 0; i < 4 + 3; i++) {
        exported e = export_block(&f, 6);
        static const uint16_t halves[] = { 0x7c00, 0xfe00, 0xfc00 };
        if (i < 4)
            memcpy(e.data + scales + 12, &numbers[i], sizeof(float));
        else
            memcpy(e.data + pages + 70 * (i - 3), &halves[i - 4], sizeof *halves);
        uint64_t check = kvant_checksum_of(e.data, e.bytes - sizeof check);
        memcpy(e.data + e.bytes - sizeof check, &check, sizeof check);
        refuse_import(&f, e.data, e.bytes);
        free(e.data);
    }
    assert_memory_equal(f.memory, before, f.bytes);
    free(before);
    drop(&f);
}

CASE(other_schemes_are_refused)
{
    static const struct {
        const char *first, *second;
        kvant_role role;
    } others[] = { { "turboquant-4", "turboquant-3", KVANT_ROLE_K },
                   { "turboquant-3", "turboquant-4", KVANT_ROLE_K },
                   { "turboquant-4:rotate=none", "turboquant-4:rotate=none", KVANT_ROLE_K },
                   { "int-4", "int-4", KVANT_ROLE_K },
                   { "turboquant-4", "turboquant-4", KVANT_ROLE_V } };
    fixture f = make("turboquant-4", 1, 4, 0);
    uint64_t rng = 3;
    write_range(&f, 0, 200, 200, 1, &rng);
    exported e = export_block(&f, 1);
    for (size_t i = 0; i < COUNT(others); i++) {
        fixture g = make_heads(others[i].first, others[i].second, others[i].role, 1, 4, 0);
        assert_int_equal(kvant_tensor_import(g.tensor, 1, e.data, e.bytes), KVANT_ERR_FORMAT);
        assert_int_equal(tensor_info_of(&g).written_blocks, 0);
        drop(&g);
    }
    free(e.data);
    drop(&f);
}

CASE(places_run_out)
{
    uint64_t rng = 82;
    /* Every kind needs another transform, which a cleared tensor makes. The last of these
     * transforms finds no room in the target. */
    const uint32_t last = 3; /* only codecs with matrices have room for more transforms */
    fixture f = make("turboquant-4:center=first", 1, BLOCKS, 0), g = make_like(&f),
            h = make_like(&f);
    for (uint32_t kind = 0; kind <= last; kind++) {
        kvant_tensor_clear(f.tensor);
        write_kind(&f, 64, 64, 64, 40.0f * (float)kind - 50, &rng);
        exported e = export_block(&f, 1);
        void *before = copy_of(g.memory, g.bytes);
        assert_int_equal(kvant_tensor_import(g.tensor, 1 + kind, e.data, e.bytes),
                         kind < last ? KVANT_OK : KVANT_ERR_FULL);
        assert_int_equal(kvant_tensor_copy(f.tensor, 1, h.tensor, 1 + kind, 1),
                         kind < last ? KVANT_OK : KVANT_ERR_FULL);
        if (kind == last)
            assert_memory_equal(g.memory, before, g.bytes);
        free(before);
        free(e.data);
    }
    assert_int_equal(tensor_info_of(&g).n_transforms, 1 + last);
    assert_alike(&g, &h);
    /* A refused copy keeps nothing, not even a transform that it found in the target. Once the
     * block of that transform is cleared, there is room. */
    kvant_tensor_clear(f.tensor);
    assert_int_equal(kvant_tensor_copy(h.tensor, 2, f.tensor, 1, 1), KVANT_OK);
    write_kind(&f, 128, 64, 64, 200, &rng);
    assert_int_equal(kvant_tensor_copy(f.tensor, 1, h.tensor, 1 + last, 2), KVANT_ERR_FULL);
    assert_int_equal(tensor_info_of(&h).written_blocks, last);
    assert_int_equal(kvant_tensor_clear_blocks(h.tensor, 2, 1), KVANT_OK);
    assert_int_equal(kvant_tensor_copy(f.tensor, 2, h.tensor, 1 + last, 1), KVANT_OK);
    assert_same_export(&f, 2, &h, 1 + last);
    drop(&h);
    drop(&g);
    drop(&f);
    /* Exact pages: a sink moves to a tensor where only sinks are ever exact. */
    fixture a = make("int-4:sink=4", 2, BLOCKS, 0);
    write_range(&a, 0, 200, 200, 1, &rng);
    exported e = export_block(&a, 0);
    fixture b = make_like(&a);
    assert_int_equal(kvant_tensor_import(a.tensor, 1, e.data, e.bytes), KVANT_ERR_FULL);
    assert_int_equal(kvant_tensor_copy(a.tensor, 0, a.tensor, 1, 1), KVANT_ERR_FULL);
    assert_int_equal(kvant_tensor_copy(a.tensor, 0, b.tensor, 1, 2), KVANT_ERR_FULL);
    check_slots(&a, 0, 200);
    assert_int_equal(tensor_info_of(&b).written_blocks, 0);
    assert_int_equal(kvant_tensor_import(a.tensor, BLOCKS, e.data, e.bytes), KVANT_OK);
    assert_ok(kvant_tensor_import(a.tensor, 0, e.data, e.bytes)); /* releases its own page */
    assert_same_export(&a, 0, &a, BLOCKS);
    assert_int_equal(kvant_tensor_copy(a.tensor, 0, a.tensor, BLOCKS, 4), KVANT_OK);
    free(e.data);
    drop(&b);
    drop(&a);
}

CASE(small_buffers_are_refused)
{
    fixture f = use(specs[0], KVANT_ROLE_K, false);
    size_t most = kvant_tensor_export_size(f.tensor), used = 77;
    uint8_t *data = malloc(most);
    exported e = export_block(&f, 1);
    assert_int_equal(kvant_tensor_export(f.tensor, 1, data, e.bytes - 1, &used),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_export(f.tensor, 1, data, 0, &used), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_export(f.tensor, 2 * BLOCKS, data, most, &used),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_export(f.tensor, 1, NULL, most, &used), KVANT_ERR_ARGUMENT);
    assert_int_equal(used, 77);
    assert_int_equal(kvant_tensor_export(f.tensor, 1, data, e.bytes, &used), KVANT_OK);
    assert_int_equal(kvant_tensor_export_size(NULL), 0);
    free(e.data);
    free(data);
    drop(&f);
}

/* A sequence is copied to the second sequence, and to another tensor. There it continues exactly as
 * the first would have. */
CASE(copies_are_alike)
{
    for (size_t s = 0; s < COUNT(specs); s++)
        for (int few = 0; few < 2; few++) {
            fixture f[2], g[2];
            for (int role = 0; role < 2; role++) {
                f[role] = use(specs[s], (kvant_role)role, few);
                g[role] = make_like(&f[role]);
                uint64_t rng = 4;
                /* the target's rows change; pending rows are counted in a tensor that has none
                 * yet */
                if (!few)
                    write_kind(&g[role], 30, 20, 1, 3, &rng);
                assert_ok(kvant_tensor_copy(f[role].tensor, 0, g[role].tensor, 0, BLOCKS));
                for (uint32_t block = 0; block < BLOCKS; block++) {
                    assert_int_equal(block_of(&f[role], block, 0).state,
                                     block_of(&g[role], block, 0).state);
                    assert_same_export(&f[role], block, &g[role], block);
                }
                memcpy(g[role].rows, f[role].rows, TOKENS * WIDTH * sizeof(float));
            }
            assert_same_attention(&f[0], &f[1], &g[0], &g[1], few ? 90 : TOKENS, 0);
            for (fixture *t = f; t; t = t == f ? g : NULL) {
                uint64_t rng = 10;
                write_kind(&t[0], few ? 90 : TOKENS, 100, 1, few ? 0 : 9, &rng);
                write_kind(&t[0], 140, 3, 1, 0, &rng);
            }
            for (uint32_t block = 0; block < BLOCKS; block++) {
                assert_int_equal(block_of(&f[0], block, 0).state, block_of(&g[0], block, 0).state);
                assert_same_rows(&f[0], block, &g[0], block);
            }
            /* Within the tensor, copies have their own pages. */
            for (int role = 0; role < 2; role++)
                assert_ok(kvant_tensor_copy(f[role].tensor, 0, f[role].tensor, BLOCKS, BLOCKS));
            for (uint32_t block = 0; block < BLOCKS; block++)
                assert_true(block_of(&f[0], block, 0).written ==
                            block_of(&f[0], BLOCKS + block, 0).written);
            uint32_t n = few ? 190 : TOKENS + 100;
            /* although the pool may have sealed some blocks */
            for (uint32_t i = few ? 50 : 0; i < n; i++)
                check_near(&f[0], BLOCKS * 64 + i, 1, f[0].rows + (size_t)i * WIDTH, few);
            write_kind(&f[0], BLOCKS * 64 + 128, 64, 64, 0, &(uint64_t){ 11 });
            check_near(&f[0], 128, few ? 62 : 64, f[0].rows + 128 * WIDTH,
                       few); /* the source did not change */
            for (int role = 0; role < 2; role++) {
                drop(&g[role]);
                drop(&f[role]);
            }
        }
}

/* With one page for two sequences, copying an exact block seals it. */
CASE(copies_of_small_pools)
{
    static const char *const pooled[] = { "int-8:axis=channel",
                                          "turboquant-8:center=first,norm=first,recent=64",
                                          "int-8:center=first" };
    for (size_t s = 0; s < COUNT(pooled); s++)
        for (uint32_t n = 30; n <= 390; n += 360) {
            uint64_t rng = 37;
            fixture f = make(pooled[s], 3, BLOCKS, 1), g = make_like(&f);
            write_range(&f, BLOCKS * 64, n, 30, 1, &rng);
            assert_ok(kvant_tensor_copy(f.tensor, BLOCKS, g.tensor, 2 * BLOCKS, BLOCKS));
            for (uint32_t block = 0; block < BLOCKS; block++)
                assert_same_rows(&f, BLOCKS + block, &g, 2 * BLOCKS + block);
            assert_int_equal(kvant_tensor_copy(f.tensor, BLOCKS, f.tensor, 0, BLOCKS), KVANT_OK);
            for (uint32_t i = 0; i < n;
                 /* 8 bits for centred numbers within 4: a range of at most 16, and two roundings */
                 i++) {
                float got[WIDTH], copy[WIDTH];
                read_slot(&f, BLOCKS * 64 + i, got);
                read_slot(&f, i, copy);
                for (uint32_t j = 0; j < WIDTH; j++) {
                    float row = f.rows[((size_t)BLOCKS * 64 + i) * WIDTH + j];
                    assert_true(fabsf(got[j] - row) < 0.5f && fabsf(copy[j] - row) < 0.5f);
                }
            }
            drop(&g);
            drop(&f);
        }
}

RUN_CASES(NULL, NULL)
