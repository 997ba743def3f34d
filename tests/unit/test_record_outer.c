/* test_record_outer.c - records whose pages the caller copies, as a GPU does: they have the bytes
 * of records that a tensor exports itself. */
#include "rotated_text.h"

#include <kvant/tensor_hooks.h>

enum { TOKENS = 1500, N_BLOCKS = (TOKENS + 63) / 64 };

static const char *const specs[] = { "turboquant-4:transform=first", "trellis-4:transform=first",
                                     "trellis-4:center=first,norm=first", "int-4", "f16" };

static const kvant_exact_part usual = {
    .size = sizeof usual, .first = 64, .newest = 128, .total = 192, .step = 512
};

static fixture make_keys(const char *of, const text *t, bool exact)
{
    fixture f = make(of, 1, BLOCKS, 0), g = f;
    kvant_rope rope = rope_of(&layouts()[2], MOST, 0);
    rope.block_centers = 1;
    if (exact) {
        g.params.exact = &usual;
        kvant_tensor_free(&f.tensor);
        free(f.memory);
        free(f.rows);
        make_tensor(&g);
    }
    assert_int_equal(kvant_tensor_set_rope(g.tensor, &rope), KVANT_OK);
    put_all(&g, t, 0, TOKENS, BATCH, 0);
    return g;
}

static uint8_t *export_own(const fixture *f, const kvant_block_slots *blocks, size_t *bytes)
{
    uint8_t *data;
    assert_int_equal(kvant_tensor_record_size(f->tensor, blocks, N_BLOCKS, bytes), KVANT_OK);
    data = malloc(*bytes);
    assert_non_null(data);
    assert_ok(kvant_tensor_export_record(f->tensor, blocks, N_BLOCKS, data, *bytes, 1));
    return data;
}

/* All slots with rows, except some of each block. */
static void list_slots(kvant_block_slots *blocks, uint64_t left_out)
{
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        blocks[i] = (kvant_block_slots){
            (i + 1 < N_BLOCKS ? UINT64_MAX : ((uint64_t)1 << TOKENS % 64) - 1) & ~left_out, i
        };
}

/* What a GPU has: blocks, and transforms as records hold them. Here they lie in a record. */
typedef struct outer {
    kvant_outer_block from[N_BLOCKS], to[N_BLOCKS];
    const void *transforms[KVANT_MAX_TRANSFORMS];
    kvant_rope rope;
    kvant_outer_record record;
} outer;

static void read_outer(const fixture *f, const uint8_t *data, size_t bytes, outer *o)
{
    kvant_block_slots all[N_BLOCKS];
    list_slots(all, 0);
    assert_ok(
        kvant_tensor_read_outer(f->tensor, all, N_BLOCKS, data, bytes, 0, o->from, o->transforms));
    o->rope = rope_of(&layouts()[2], 0, 0);
    o->record = (kvant_outer_record){
        .blocks = o->to, .n_blocks = N_BLOCKS, .transforms = o->transforms, .rope = &o->rope
    };
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        o->to[i] = o->from[i];
        if (o->from[i].transform >= o->record.n_transforms)
            o->record.n_transforms = o->from[i].transform + 1;
    }
}

/* left_out: slots of each block that the second record does not hold. by: the distance by which
 * keys moved before. */
static void check_bytes(const char *of, const text *t, bool exact, int32_t by, uint64_t left_out)
{
    fixture f = make_keys(of, t, exact);
    const kvant_tensor_info info = tensor_info_of(&f);
    kvant_block_slots all[N_BLOCKS], some[N_BLOCKS];
    outer o = { 0 };
    size_t bytes, whole, own;
    if (by) {
        const kvant_rope rope = rope_of(&layouts()[2], 0, 0);
        int32_t distances[TOKENS];
        for (int i = 0; i < TOKENS; i++)
            distances[i] = by;
        assert_int_equal(kvant_tensor_shift(f.tensor, &rope, distances, TOKENS, 1), KVANT_OK);
    }
    list_slots(all, 0);
    list_slots(some, left_out);
    uint8_t *source = export_own(&f, all, &whole), *expected = export_own(&f, some, &own);
    read_outer(&f, source, whole, &o);
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        o.to[i].slots = some[i].slots;
        assert_int_equal(o.from[i].shift, by);
        assert_int_equal(o.from[i].rows != NULL, o.from[i].exact);
    }
    assert_int_equal(kvant_tensor_outer_size(f.tensor, &o.record, &bytes), KVANT_OK);
    assert_int_equal(bytes, own);
    uint8_t *data = malloc(bytes);
    assert_non_null(data);
    assert_int_equal(kvant_tensor_outer_begin(f.tensor, &o.record, data, bytes - 8),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_outer_begin(f.tensor, &o.record, data, bytes), KVANT_OK);
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        if (o.to[i].rows)
            memcpy(o.to[i].rows, o.from[i].rows, info.open_bytes);
        if (o.to[i].codes)
            memcpy(o.to[i].codes, o.from[i].codes, info.sealed_bytes);
    }
    assert_int_equal(kvant_tensor_outer_end(f.tensor, &o.record, data, bytes), KVANT_OK);
    assert_memory_equal(data, expected, bytes);
    free(data);
    free(source);
    free(expected);
    drop(&f);
}

/* A block without rows takes the transforms of two records one after another. */
CASE(blocks_take_transforms)
{
    text *t[2];
    fixture f[2], g = make("trellis-4:transform=first", 1, BLOCKS, 0);
    uint8_t *data[2], *again = malloc(kvant_tensor_transform_size(g.tensor));
    kvant_block_slots all[N_BLOCKS];
    static outer o[2];
    size_t bytes, n;
    list_slots(all, 0);
    for (uint32_t i = 0; i < 2; i++) {
        t[i] = make_text(&layouts()[2], 73 + i);
        f[i] = make_keys("trellis-4:transform=first", t[i], true);
        data[i] = export_own(&f[i], all, &bytes);
        read_outer(&f[i], data[i], bytes, &o[i]);
    }
    for (uint32_t i = 0; i < 40; i++) {
        const void *transform = o[i % 2].transforms[0];
        assert_int_equal(kvant_tensor_set_transform(g.tensor, 0, transform, 2), KVANT_OK);
        assert_int_equal(kvant_tensor_get_transform(g.tensor, 0, again, &n), KVANT_OK);
        assert_int_equal(n, kvant_tensor_transform_bytes(g.tensor, transform));
        assert_memory_equal(again, transform, n);
    }
    assert_memory_not_equal(o[0].transforms[0], o[1].transforms[0], n);
    assert_int_equal(kvant_tensor_set_transform(f[0].tensor, 0, again, 2), KVANT_ERR_ARGUMENT);
    again[0] = 9;
    assert_int_equal(kvant_tensor_set_transform(g.tensor, 0, again, 2), KVANT_ERR_FORMAT);
    free(again);
    for (uint32_t i = 0; i < 2; i++) {
        free(data[i]);
        drop(&f[i]);
        free(t[i]);
    }
    drop(&g);
}

/* Any changed byte is refused, and so is a record of other slots. */
CASE(damage_is_refused)
{
    text *t = make_text(&layouts()[2], 74);
    fixture f = make_keys("trellis-4:transform=first", t, true);
    kvant_block_slots all[N_BLOCKS];
    outer o = { 0 };
    size_t bytes;
    list_slots(all, 0);
    uint8_t *data = export_own(&f, all, &bytes);
    for (size_t at = 0; at < bytes; at += at < 512 ? 1 : bytes / 97) {
        data[at] ^= 4;
        assert_int_equal(
            kvant_tensor_read_outer(f.tensor, all, N_BLOCKS, data, bytes, 0, o.from, o.transforms),
            KVANT_ERR_FORMAT);
        data[at] ^= 4;
        assert_int_equal(
            kvant_tensor_read_outer(f.tensor, all, N_BLOCKS, data, at, 0, o.from, o.transforms),
            KVANT_ERR_FORMAT);
    }
    all[3].slots = 1;
    assert_int_equal(
        kvant_tensor_read_outer(f.tensor, all, N_BLOCKS, data, bytes, 0, o.from, o.transforms),
        KVANT_ERR_FORMAT);
    free(data);
    drop(&f);
    free(t);
}

CASE(bytes_are_those_of_a_tensor)
{
    text *t = make_text(&layouts()[2], 71);
    for (size_t i = 0; i < COUNT(specs); i++)
        for (int exact = 0; exact < 2; exact++) {
            check_bytes(specs[i], t, exact, 0, 0);
            check_bytes(specs[i], t, exact, -77, 0);
            check_bytes(specs[i], t, exact, 0, 0x00ff00ff00f0f00fu);
        }
    free(t);
}

/* Rows of groups share scales, so slots cannot be left out of sealed blocks without decoding. */
CASE(shared_scales_are_refused)
{
    text *t = make_text(&layouts()[2], 72);
    fixture f = make_keys("int-4:axis=channel,group=32", t, false);
    kvant_block_slots all[N_BLOCKS];
    outer o = { 0 };
    size_t bytes, own;
    list_slots(all, 0);
    uint8_t *data = export_own(&f, all, &own);
    read_outer(&f, data, own, &o);
    o.to[0].slots = 0xffffffffu;
    assert_int_equal(kvant_tensor_outer_size(f.tensor, &o.record, &bytes), KVANT_OK);
    o.to[1].slots = 0xffff;
    assert_int_equal(kvant_tensor_outer_size(f.tensor, &o.record, &bytes), KVANT_ERR_UNSUPPORTED);
    free(data);
    drop(&f);
    free(t);
}

RUN_CASES(NULL, NULL)
