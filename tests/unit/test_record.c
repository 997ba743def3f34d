/* test_record.c - blocks that move together in a record: their rows, transforms and shifts, and
 * records that are damaged or belong elsewhere. test_transfer.c and test_export.c have blocks that
 * move one by one. */
#include "rotated_text.h"

#include "../../src/base/fnv.h"

enum { TOKENS = 1500, N_BLOCKS = (TOKENS + 63) / 64, HEAD = 32 };

/* Codes of rows and of groups, with and without matrices, windows, and fp16 rows. */
static const char *const specs[] = { "turboquant-4:transform=first",
                                     "trellis-4:transform=first",
                                     "trellis-4:center=first,norm=first",
                                     "int-4",
                                     "int-4:axis=channel,group=32,recent=100,sink=4",
                                     "f16" };

static const kvant_exact_part usual = {
    .size = sizeof usual, .first = 64, .newest = 128, .total = 192, .step = 512
};

static fixture make_keys(const char *of, const text *t, const kvant_exact_part *part)
{
    fixture f = make(of, 1, BLOCKS, 0), exact = f;
    kvant_rope rope = rope_of(&layouts()[2], MOST, 0);
    rope.block_centers = 1;
    if (part) {
        exact.params.exact = part;
        kvant_tensor_free(&f.tensor);
        free(f.memory);
        free(f.rows);
        make_tensor(&exact);
    }
    assert_int_equal(kvant_tensor_set_rope(exact.tensor, &rope), KVANT_OK);
    if (t)
        put_all(&exact, t, 0, TOKENS, BATCH, 0);
    return exact;
}

/* An empty tensor with the codecs of f, but another number of blocks. */
static fixture make_smaller(const fixture *f, uint32_t blocks)
{
    fixture g = *f;
    g.owned[0] = g.owned[1] = NULL;
    g.params.n_blocks = g.params.blocks_per_sequence = blocks;
    make_tensor(&g);
    return g;
}

typedef struct blocks {
    kvant_block_slots list[BLOCKS];
    uint32_t n;
} blocks;

/* All rows of the text, in blocks that begin at `first`. */
static blocks all_from(uint32_t first)
{
    blocks b = { .n = N_BLOCKS };
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        b.list[i] =
            (kvant_block_slots){ i + 1 < N_BLOCKS ? UINT64_MAX : ((uint64_t)1 << TOKENS % 64) - 1,
                                 first + i };
    return b;
}

static exported export_record(const fixture *f, const blocks *b)
{
    exported e = { NULL, 0 };
    assert_int_equal(kvant_tensor_record_size(f->tensor, b->list, b->n, &e.bytes), KVANT_OK);
    e.data = malloc(e.bytes);
    assert_non_null(e.data);
    assert_ok(kvant_tensor_export_record(f->tensor, b->list, b->n, e.data, e.bytes, 3));
    return e;
}

static kvant_status import_record(const fixture *f, const blocks *b, const exported *e)
{
    return kvant_tensor_import_record(f->tensor, b->list, b->n, e->data, e->bytes, 3);
}

static void assert_same_rows(const fixture *f, uint32_t slot, const fixture *g, uint32_t other)
{
    float a[WIDTH], b[WIDTH];
    read_slot(f, slot, a);
    read_slot(g, other, b);
    assert_memory_equal(a, b, sizeof a);
}

static void shift(fixture *f, uint32_t first, uint32_t end, int32_t by)
{
    const kvant_rope rope = rope_of(&layouts()[2], 0, 0);
    int32_t all[TOKENS] = { 0 };
    for (uint32_t slot = first; slot < end; slot++)
        all[slot] = by;
    assert_int_equal(kvant_tensor_shift(f->tensor, &rope, all, TOKENS, 1), KVANT_OK);
}

/* Bytes of the blocks as single exports. */
static size_t single_bytes(const fixture *f)
{
    size_t bytes = 0;
    for (uint32_t block = 0; block < N_BLOCKS; block++) {
        exported e = export_block(f, block);
        bytes += e.bytes;
        free(e.data);
    }
    return bytes;
}

/* Rows keep their bits in an empty tensor, at other blocks, and in a tensor that had rows. Shifted
 * keys stay shifted. A record of the imported blocks has the same bytes. */
static void check_moves(const char *of, const text *t, const kvant_exact_part *part, bool shifted)
{
    fixture f = make_keys(of, t, part), g = make_smaller(&f, 40), h = make_keys(of, t, part);
    const blocks all = all_from(0), later = all_from(9);
    if (shifted) {
        shift(&f, 10, TOKENS, -77);
        shift(&f, 400, 420, 30);
    }
    exported e = export_record(&f, &all), again, third;
    assert_true(e.bytes < single_bytes(&f));
    assert_int_equal(import_record(&g, &later, &e), KVANT_OK);
    assert_int_equal(import_record(&h, &all, &e), KVANT_OK);
    for (uint32_t slot = 0; slot < TOKENS; slot++) {
        assert_same_rows(&f, slot, &g, slot + 9 * 64);
        assert_same_rows(&f, slot, &h, slot);
    }
    again = export_record(&h, &all);
    third = export_record(&f, &all);
    assert_int_equal(again.bytes, e.bytes);
    assert_memory_equal(again.data, e.data, e.bytes);
    assert_memory_equal(third.data, e.data, e.bytes);
    free(e.data);
    free(again.data);
    free(third.data);
    drop(&g);
    drop(&h);
    drop(&f);
}

CASE(rows_keep_their_bits)
{
    text *t = make_text(&layouts()[2], 61);
    for (size_t i = 0; i < COUNT(specs); i++) {
        check_moves(specs[i], t, NULL, false);
        check_moves(specs[i], t, NULL, true);
        check_moves(specs[i], t, &usual, false);
        check_moves(specs[i], t, &usual, true);
    }
    free(t);
}

/* The bytes of 24 blocks with matrices hold one copy of each transform. A tensor with RoPE has few
 * transforms for 1500 tokens. */
CASE(a_record_holds_each_transform_once)
{
    text *t = make_text(&layouts()[2], 62);
    fixture f = make_keys("trellis-4:transform=first", t, NULL);
    const blocks all = all_from(0);
    const kvant_tensor_info info = tensor_info_of(&f);
    exported e = export_record(&f, &all);
    const size_t matrix = N_KV_HEADS * kvant_triangle_size(HEAD_DIM) * sizeof(uint16_t),
                 vectors = 3 * WIDTH * sizeof(float) + HEAD_DIM / 2 * sizeof(float) + 8;
    /* Heads of the record, of each transform (8 bytes) and of each block (32 bytes). The first
     * block is a sink, whose page is fp16. */
    assert_true(e.bytes <= HEAD + 8 + info.n_transforms * (8 + matrix + vectors) +
                               N_BLOCKS * (32 + info.sealed_bytes) + info.open_bytes);
    free(e.data);
    drop(&f);
    free(t);
}

/* The slots of open pages that have codes, too, by block of a record whose transforms have no
 * numbers. Returns how many there are. */
static uint32_t read_coded(const fixture *f, const exported *e, uint64_t coded[N_BLOCKS])
{
    const kvant_tensor_info info = tensor_info_of(f);
    uint32_t n = 0, n_transforms;
    memcpy(&n_transforms, e->data + 28, sizeof n_transforms);
    const uint8_t *at = e->data + HEAD + 8 * n_transforms;
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        uint32_t form;
        memcpy(&coded[i], at + 8, sizeof coded[i]);
        memcpy(&form, at + 16, sizeof form);
        at += 32 + (form ? info.open_bytes : 0) + (!form || coded[i] ? info.sealed_bytes : 0);
        for (uint64_t left = coded[i]; left; left &= left - 1)
            n++;
    }
    assert_ptr_equal(at, e->data + e->bytes - 8);
    return n;
}

/* Rows that have codes, but whose block is not sealed yet, come back with their codes: the restored
 * tensor encodes only rows that the saved one would encode. */
CASE(rows_with_codes_are_not_encoded_again)
{
    static const char *const rowwise[] = { "trellis-4", "int-4", "turboquant-4" };
    text *t = make_text(&layouts()[2], 68);
    const blocks all = all_from(0);
    for (size_t i = 0; i < COUNT(rowwise); i++) {
        fixture f = make_keys(rowwise[i], t, &usual), g = make_like(&f);
        for (uint32_t token = TOKENS; token < TOKENS + 20; token++)
            write_rows(&f, token, 1, t->rows + (size_t)token * WIDTH, 1, 1);
        exported e = export_record(&f, &all);
        uint64_t coded[2][N_BLOCKS];
        assert_in_range(read_coded(&f, &e, coded[0]), 1, 63);
        assert_int_equal(import_record(&g, &all, &e), KVANT_OK);
        exported again = export_record(&g, &all);
        assert_int_equal(again.bytes, e.bytes);
        read_coded(&g, &again, coded[1]);
        assert_memory_equal(coded[0], coded[1], sizeof coded[0]);
        free(again.data);
        free(e.data);
        drop(&g);
        drop(&f);
    }
    free(t);
}

/* Slots that are left out leave no bit: they read as never written, and the record equals that of
 * other rows in these slots. */
CASE(other_slots_leave_no_bit)
{
    text *t = make_text(&layouts()[2], 63), *u = make_text(&layouts()[2], 64);
    const uint64_t kept = 0x00ff00ff00ff00ffu;
    const blocks some = { { { kept, 3 }, { ~kept, 5 } }, 2 };
    for (size_t i = 0; i < 2; i++) {
        const char *of = i ? "int-4" : "trellis-4";
        fixture f = make_keys(of, t, NULL), g = make_like(&f), h = make_keys(of, t, NULL);
        for (uint32_t slot = 3 * 64; slot < 6 * 64; slot++)
            if (!((slot / 64 == 3 ? kept : slot / 64 == 5 ? ~kept : 0) >> slot % 64 & 1))
                write_rows(&h, slot, 1, u->rows + (size_t)slot * WIDTH, 1, 1);
        exported e = export_record(&f, &some), other = export_record(&h, &some);
        assert_int_equal(e.bytes, other.bytes);
        assert_memory_equal(e.data, other.data, e.bytes);
        assert_int_equal(import_record(&g, &some, &e), KVANT_OK);
        assert_int_equal(block_of(&g, 3, 0).written, kept);
        assert_int_equal(block_of(&g, 5, 0).written, ~kept);
        free(e.data);
        free(other.data);
        drop(&g);
        drop(&h);
        drop(&f);
    }
    free(t);
    free(u);
}

/* Writes the checksum of a record that a test changed. */
static void sign(const exported *e)
{
    const uint64_t sum = kvant_checksum_of(e->data, e->bytes - sizeof sum);
    memcpy(e->data + e->bytes - sizeof sum, &sum, sizeof sum);
}

/* A record that is cut short, or in which any byte differs, is refused, and so is one with the
 * checksum of its damaged bytes unless they are a valid record. Nothing changes. */
CASE(damage_is_refused)
{
    text *t = make_text(&layouts()[2], 65);
    const blocks all = all_from(0);
    for (int i = 0; i < 2; i++) {
        fixture f = make_keys("trellis-4:transform=first", t, i ? &usual : NULL), g = make_like(&f);
        exported e = export_record(&f, &all);
        uint8_t *data = malloc(e.bytes);
        for (size_t at = 0; at < e.bytes; at += at < 4096 ? 1 : 101) {
            const exported cut = { data, at };
            memcpy(data, e.data, e.bytes);
            assert_int_equal(import_record(&g, &all, &cut), KVANT_ERR_FORMAT);
            data[at] = (uint8_t)(data[at] ^ 1u << at % 8);
            assert_int_equal(import_record(&g, &all, &(exported){ data, e.bytes }),
                             KVANT_ERR_FORMAT);
        }
        assert_int_equal(tensor_info_of(&g).written_blocks, 0);
        for (size_t at = 0; at < HEAD + 4096; at++) {
            memcpy(data, e.data, e.bytes);
            data[at] ^= 0x80;
            sign(&(exported){ data, e.bytes });
            const kvant_status status = import_record(&g, &all, &(exported){ data, e.bytes });
            assert_true(status == KVANT_OK || status == KVANT_ERR_FORMAT ||
                        status == KVANT_ERR_FULL);
            assert_true(at >= HEAD || status == KVANT_ERR_FORMAT);
            if (status == KVANT_OK)
                kvant_tensor_clear(g.tensor);
        }
        free(data);
        free(e.data);
        drop(&g);
        drop(&f);
    }
    free(t);
}

/* The sums of a position and a slot fit an int32_t wherever a record goes, so other positions are
 * refused. */
CASE(impossible_positions_are_refused)
{
    static const struct {
        int32_t position;
        kvant_status status;
    } cases[] = { { INT32_MIN, KVANT_OK },        { INT32_MIN + 1, KVANT_ERR_FORMAT },
                  { -64, KVANT_ERR_FORMAT },      { -63, KVANT_OK },
                  { INT32_MAX - 64, KVANT_OK },   { INT32_MAX - 63, KVANT_ERR_FORMAT },
                  { INT32_MAX, KVANT_ERR_FORMAT } };
    text *t = make_text(&layouts()[2], 69);
    fixture f = make_keys("int-4", t, NULL), g = make_like(&f);
    const blocks all = all_from(0);
    exported e = export_record(&f, &all);
    for (size_t i = 0; i < COUNT(cases); i++) {
        /* the position in the head of the first block, after one transform without numbers */
        memcpy(e.data + HEAD + 8 + 24, &cases[i].position, sizeof cases[i].position);
        sign(&e);
        assert_int_equal(import_record(&g, &all, &e), cases[i].status);
    }
    free(e.data);
    drop(&g);
    drop(&f);
    free(t);
}

CASE(records_of_others_are_refused)
{
    text *t = make_text(&layouts()[2], 66);
    fixture f = make_keys("trellis-4:transform=first", t, NULL),
            g = make_keys("trellis-3:transform=first", t, NULL), h = make_like(&f);
    const blocks all = all_from(0);
    blocks fewer = all, beyond = all, twice = all, moved = all;
    exported e = export_record(&f, &all), before = export_record(&g, &all), after;
    fewer.n--;
    beyond.list[3].block = BLOCKS;
    twice.list[3].block = 4;
    moved.list[3].slots = 1;
    assert_int_equal(import_record(&g, &all, &e), KVANT_ERR_FORMAT);
    after = export_record(&g, &all);
    assert_int_equal(after.bytes, before.bytes);
    assert_memory_equal(after.data, before.data, after.bytes);
    assert_int_equal(import_record(&h, &fewer, &e), KVANT_ERR_FORMAT);
    assert_int_equal(import_record(&h, &beyond, &e), KVANT_ERR_ARGUMENT);
    assert_int_equal(import_record(&h, &twice, &e), KVANT_ERR_ARGUMENT);
    assert_int_equal(import_record(&h, &moved, &e), KVANT_ERR_FORMAT);
    assert_int_equal(tensor_info_of(&h).written_blocks, 0);
    assert_int_equal(import_record(&h, &all, &e), KVANT_OK);
    free(e.data);
    free(before.data);
    free(after.data);
    drop(&h);
    drop(&g);
    drop(&f);
    free(t);
}

/* The keys of a tensor have one RoPE. A record whose blocks have two is refused before anything
 * changes. */
CASE(two_ropes_are_refused)
{
    text *t = make_text(&layouts()[2], 69);
    fixture f = make_keys("int-4", t, NULL), g = make_like(&f);
    const blocks two = { { { UINT64_MAX, 2 }, { UINT64_MAX, 3 } }, 2 };
    const float other = 0.5f;
    shift(&f, 0, TOKENS, -77);
    exported e = export_record(&f, &two);
    const size_t block = (e.bytes - HEAD - 8 - 8) / 2; /* one transform without numbers */
    memcpy(e.data + HEAD + 8 + block + 32 + 8, &other, sizeof other);
    sign(&e);
    assert_int_equal(import_record(&g, &two, &e), KVANT_ERR_FORMAT);
    assert_int_equal(tensor_info_of(&g).written_blocks, 0);
    free(e.data);
    drop(&g);
    drop(&f);
    free(t);
}

/* A restored cache goes on like the cache that was saved: later rows get the same bytes. */
CASE(restored_tensors_go_on_alike)
{
    text *t = make_text(&layouts()[2], 67);
    const blocks all = all_from(0);
    for (size_t i = 0; i < COUNT(specs); i++) {
        fixture f = make_keys(specs[i], t, &usual), g = make_like(&f);
        kvant_rope rope = rope_of(&layouts()[2], MOST, 0);
        rope.block_centers = 1;
        assert_int_equal(kvant_tensor_set_rope(g.tensor, &rope), KVANT_OK);
        exported e = export_record(&f, &all);
        assert_int_equal(import_record(&g, &all, &e), KVANT_OK);
        for (uint32_t token = TOKENS; token < TOKENS + 40; token++) {
            write_rows(&f, token, 1, t->rows + (size_t)token * WIDTH, 1, 1);
            write_rows(&g, token, 1, t->rows + (size_t)token * WIDTH, 1, 1);
        }
        for (uint32_t slot = 0; slot < TOKENS + 40; slot++)
            assert_same_rows(&f, slot, &g, slot);
        free(e.data);
        drop(&g);
        drop(&f);
    }
    free(t);
}

RUN_CASES(NULL, NULL)
