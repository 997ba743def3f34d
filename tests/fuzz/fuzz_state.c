/* fuzz_state.c - any bytes as a saved run of cells, and as a packed state (format.md, "Saved
 * states"). They are refused, or what they say is restored; no access leaves them, and cells that
 * were not restored are invalid or keep rows. For libFuzzer (clang -fsanitize=fuzzer). With
 * KVANT_FUZZ_SMOKE it is a program that mutates valid states itself, a fixed number of times.
 *
 * The input is one byte that picks what the rest is. Checksums would refuse nearly every mutation
 * at once, so the program computes all of them as far as the sizes in the input are possible. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../integrations/llama.cpp/host.h"
#include "../../integrations/llama.cpp/pack.h"
#include "../../src/base/fnv.h"
#include "../../src/cache/record.h"
#include "../../src/cache/transform_bytes.h"
#include "../unit/state_mocks.h"
#include "mutate.h"

enum {
    HEAD = 64,
    CELLS = 300,
    FIRST = 20, /* the cell of the first saved row */
    RUN = 150,
    ROW = HEAD * 2,
    NOMINAL = RUN * ROW,
    PARTS = 3 /* of a packed state */
};

/* MOVED: the rows come to other cells, so that without a placement they are decoded. */
enum { PLACED = 1, IN_PIECES = 2, PACKED = 4, EARLY = 8, MOVED = 16, ALL_KINDS = 32 };

static struct cache {
    kvp_kv kv;
    kvant_codec *owned;
    const kvant_codec *codec;
    void *memory;
    uint32_t n_blocks;
} f;

static void require_at(int condition, int line)
{
    if (condition)
        return;
    fprintf(stderr, "fuzz_state.c:%d: not as it has to be: %s\n", line, kvant_error_message());
    abort();
}

#define require(condition) require_at(condition, __LINE__)

uint32_t kvp_kv_blocks(const kvp_kv_shape *shape)
{
    return f.n_blocks;
}

const kvant_codec *const *kvp_kv_codecs(const kvp_kv *kv)
{
    return &f.codec;
}

kvant_status kvp_kv_assign_block(kvp_kv *kv, uint32_t block)
{
    const kvp_block b = kvp_placement_block(kv->placement, block);
    const kvant_status status = kvant_tensor_clear_blocks(kv->tensor, block, 1);
    return status == KVANT_OK ? kvant_tensor_assign(kv->tensor, block, 0, b.index) : status;
}

/* Stores rows of a run whose blocks do not fit here. */
void kvp_kv_store_rows(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows)
{
    int64_t *slots = malloc(n * sizeof *slots);
    require(slots != NULL);
    if (kv->placement)
        require(kvp_placement_write(kv->placement, cells, n, NULL, slots));
    for (size_t i = 0; i < n; i++)
        slots[i] = kvp_kv_slot(kv, cells[i]);
    /* decoded rows may be beyond the codec's range */
    const bool stored = kvant_tensor_write(kv->tensor, slots, n, rows, HEAD, 1) == KVANT_OK;
    for (size_t i = 0; i < n; i++)
        kvp_invalid_set(&kv->invalid, (size_t)cells[i], 1, !stored);
    free(slots);
}

bool kvp_restoring_refuse(const char *why)
{
    require(why && why[0]);
    return true;
}

static void make_cache(int kind)
{
    kvant_tensor_params params = { .size = sizeof params, .n_kv_heads = 1, .n_sequences = 1 };
    size_t bytes;
    f = (struct cache){ .n_blocks =
                            kind & PLACED ? kvp_placement_blocks(CELLS) : (CELLS + 63) / 64 };
    require(kvant_codec_create("int-4", HEAD, KVANT_ROLE_K, 1, &f.owned, NULL, 0) == KVANT_OK);
    f.codec = f.owned;
    params.codecs = &f.codec;
    params.n_blocks = f.n_blocks;
    require(kvant_tensor_size(&params, &bytes) == KVANT_OK);
    f.memory = kvant_os_alloc(KVANT_PAGE_ALIGN, bytes);
    require(f.memory != NULL);
    memset(f.memory, 0, bytes);
    require(kvant_tensor_create(&params, f.memory, &f.kv.tensor) == KVANT_OK);
    f.kv.shape = (kvp_kv_shape){ .row = HEAD, .n_cells = CELLS, .n_streams = 1 };
    f.kv.head_dim = HEAD;
    strcpy(f.kv.name, "fuzzed");
    f.kv.placement = kind & PLACED ? kvp_placement_create(CELLS) : NULL;
    require(!(kind & PLACED) == !f.kv.placement && kvp_invalid_create(&f.kv.invalid, CELLS));
}

static void free_cache(void)
{
    kvp_state_drop(&f.kv);
    kvp_placement_free(f.kv.placement);
    kvp_invalid_free(&f.kv.invalid);
    kvant_tensor_free(&f.kv.tensor);
    kvant_os_free(f.memory);
    kvant_codec_free(&f.owned);
}

/* Rows for cells first .. first + n - 1. */
static void store(int64_t first, size_t n, float offset)
{
    static float rows[CELLS * HEAD];
    int64_t cells[CELLS];
    for (size_t i = 0; i < n * HEAD; i++)
        rows[i] = offset + (float)(i % 17) - 8;
    for (size_t i = 0; i < n; i++)
        cells[i] = first + (int64_t)i;
    kvp_kv_store_rows(&f.kv, cells, n, rows);
}

/* Every cell is invalid, or it has a slot that can be read, or it never had a row. */
static void look_at_cells(void)
{
    float row[HEAD];
    for (size_t cell = 0; cell < CELLS; cell++) {
        const int64_t slot = kvp_kv_slot(&f.kv, (int64_t)cell);
        if (slot < 0 || kvp_invalid_has(&f.kv.invalid, cell))
            continue;
        require(slot < (int64_t)f.n_blocks * KVANT_PAGE_TOKENS &&
                kvant_tensor_read_slots(f.kv.tensor, &slot, 1, row, HEAD, 1) == KVANT_OK);
    }
}

/* Signing. Sizes that the bytes do not have are left as they are. */

static void put(uint8_t *at, uint64_t number)
{
    memcpy(at, &number, sizeof number);
}

static void sign_run(uint8_t *run, size_t n)
{
    kvp_state_header head;
    kvant_record_header record;
    if (n < sizeof head)
        return;
    memcpy(&head, run, sizeof head);
    const uint64_t lists = kvp_state_list_bytes(head.n_blocks, head.n_runs);
    if (lists > n || head.bytes > n || head.bytes < lists + sizeof record + 8)
        return;
    memcpy(head.magic, KVP_STATE_MAGIC, KVP_STATE_MAGIC_BYTES);
    head.check = kvp_state_check(&head, run + sizeof head);
    memcpy(run, &head, sizeof head);
    const size_t bytes = (size_t)(head.bytes - lists);
    memcpy(&record, run + lists, sizeof record);
    record.magic = KVANT_RECORD_MAGIC;
    record.bytes = bytes;
    record.scheme = kvant_tensor_scheme(f.kv.tensor);
    memcpy(run + lists, &record, sizeof record);
    put(run + head.bytes - 8, kvant_checksum_of(run + lists, bytes - 8));
}

static void sign_packed(uint8_t *packed, size_t n)
{
    kvp_pack_header head;
    kvant_checksum sum;
    uint64_t prefix = n, at;
    if (n < sizeof head)
        return;
    memcpy(&head, packed, sizeof head);
    if (kvp_pack_head_bytes(head.n_runs, head.n_tokens) > n)
        return;
    kvp_pack_run run;
    for (uint32_t i = 0; i < head.n_runs; i++) {
        memcpy(&run, packed + sizeof head + i * sizeof run, sizeof run);
        if (run.kept > prefix)
            return;
        prefix -= run.kept;
    }
    at = prefix;
    for (uint32_t i = 0; i < head.n_runs && prefix >= sizeof head; i++, at += run.kept) {
        uint8_t *const entry = packed + sizeof head + i * sizeof run;
        kvp_state_header of;
        memcpy(&run, entry, sizeof run);
        sign_run(packed + at, (size_t)run.kept);
        if (run.kept < sizeof of)
            continue;
        memcpy(&of, packed + at, sizeof of);
        const uint64_t lists = kvp_state_list_bytes(of.n_blocks, of.n_runs);
        if (lists + 8 <= run.kept)
            put(entry + offsetof(kvp_pack_run, check),
                kvp_pack_run_check(packed + at, (size_t)lists, (size_t)run.kept));
    }
    if (prefix < sizeof head)
        return;
    memcpy(head.magic, KVP_PACK_MAGIC, KVP_STATE_MAGIC_BYTES);
    head.bytes = n;
    head.check = 0;
    kvant_checksum_begin(&sum);
    kvant_checksum_add(&sum, &head, sizeof head);
    kvant_checksum_add(&sum, packed + sizeof head, (size_t)prefix - sizeof head);
    head.check = kvant_checksum_end(&sum);
    memcpy(packed, &head, sizeof head);
}

/* Restoring */

static size_t first_cell(int kind)
{
    return kind & MOVED ? 27 : FIRST;
}

/* As llama.cpp writes a run: at once, or in pieces of whole rows. */
static void write_run(const uint8_t *bytes, size_t n, int kind)
{
    const size_t piece = kind & IN_PIECES ? 7 * ROW : n, first = first_cell(kind);
    for (size_t done = 0, used; done + ROW <= n; done += used) {
        const size_t left = n - done < piece ? n - done : piece;
        uint8_t *part = malloc(left); /* so that a sanitiser sees any access beyond it */
        require(part != NULL);
        memcpy(part, bytes + done, left);
        used = kvp_state_write(&f.kv, first + done / ROW, part, left, NULL);
        require(used <= left && used % ROW == 0);
        if (!used) {
            used = kvp_state_before_record(&f.kv, part, left);
            require(used > 0);
        }
        free(part);
    }
}

static void restore_packed(const uint8_t *bytes, size_t n, int kind)
{
    const kvp_pack_source source = { .from = bytes, .n = n };
    int32_t ids[PARTS];
    kvp_pack_tokens tokens = { ids, PARTS, 0 };
    kvp_unpacking u;
    if (kvp_unpacking_begin(&u, &source, false, (kind & EARLY) != 0, &tokens, NULL, NULL) != NULL)
        return;
    require(tokens.n <= PARTS && kvp_pack_bytes(&u.plain, tokens.n) == n);
    bool ok = u.early || kvp_unpacking_finish(&u) == NULL;
    for (uint32_t i = 0; i < u.plain.n_runs && ok; i++) {
        const kvp_pack_run run = u.plain.runs[i];
        require(run.at <= u.plain.n && run.room <= u.plain.n - run.at);
        /* llama.cpp reads no more than its cache has */
        const size_t room = run.room < NOMINAL ? (size_t)run.room : NOMINAL;
        const uint8_t *from =
            kvp_unpacking_wait(&u, u.plain.bytes + run.at, room, room == run.room);
        ok = from != NULL;
        if (ok && from == u.plain.bytes + run.at)
            write_run(from, room, kind);
    }
    (void)kvp_unpacking_finish(&u);
    kvp_unpacking_free(&u);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n); /* libFuzzer's name */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 2)
        return 0;
    const int kind = data[0] % ALL_KINDS;
    const size_t bytes = n - 1;
    uint8_t *copy = malloc(bytes);
    require(copy != NULL);
    memcpy(copy, data + 1, bytes);
    make_cache(kind);
    store(0, CELLS, 5);
    if (kind & PACKED) {
        sign_packed(copy, bytes);
        restore_packed(copy, bytes, kind);
    } else {
        sign_run(copy, bytes);
        write_run(copy, bytes, kind);
    }
    look_at_cells();
    store(30, 100, 1);
    look_at_cells();
    free_cache();
    free(copy);
    return 0;
}

#ifdef KVANT_FUZZ_SMOKE
#define ROUNDS 150u /* for each kind */

/* A run of cells, as llama.cpp reads it. Returns the bytes of its head, lists and record. */
static size_t make_run(uint8_t *out)
{
    kvp_state_header head;
    store(0, CELLS, 0);
    memset(out, 0, NOMINAL);
    require(kvp_state_read(&f.kv, FIRST, RUN, out));
    memcpy(&head, out, sizeof head);
    return (size_t)head.bytes;
}

/* Runs of a state that has some other bytes before, between and behind them. */
static size_t make_packed(uint8_t *out)
{
    static uint8_t run[NOMINAL];
    static const int32_t ids[PARTS] = { 1, -7, 1 << 30 };
    const size_t kept = make_run(run), size = PARTS * (NOMINAL + 40) + 9;
    kvp_plain plain;
    uint64_t prefix, at;
    require(kvp_plain_create(&plain, size));
    memset(plain.bytes, 3, size);
    for (uint32_t i = 0; i < PARTS; i++)
        require(kvp_plain_add(&plain, i * (NOMINAL + 40) + 11, kept, NOMINAL));
    prefix = kvp_pack_prefix(&plain, PARTS);
    const kvp_pack_header head = {
        .bytes = kvp_pack_bytes(&plain, PARTS), .nominal = size, .n_runs = PARTS, .n_tokens = PARTS
    };
    memset(out, 0, (size_t)head.bytes);
    memcpy(out, &head, sizeof head);
    memcpy(out + sizeof head, plain.runs, PARTS * sizeof *plain.runs);
    memcpy(out + sizeof head + PARTS * sizeof *plain.runs, ids, sizeof ids);
    at = kvp_pack_head_bytes(PARTS, PARTS);
    memset(out + at, 3, (size_t)(prefix - at));
    for (at = prefix; at < head.bytes; at += kept)
        memcpy(out + at, run, kept);
    kvp_plain_free(&plain);
    sign_packed(out, (size_t)head.bytes);
    return (size_t)head.bytes;
}

/* A valid state restores all its cells. */
static void require_valid(uint8_t *data, size_t n, int kind)
{
    make_cache(kind);
    store(0, CELLS, 5);
    kvp_invalid_set(&f.kv.invalid, first_cell(kind), RUN, true);
    if (kind & PACKED)
        restore_packed(data + 1, n - 1, kind);
    else
        write_run(data + 1, n - 1, kind);
    require(f.kv.invalid.n == 0);
    free_cache();
}

int main(int argc, char **argv)
{
    static uint8_t valid[PARTS * NOMINAL], data[PARTS * NOMINAL + 1];
    const unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : ROUNDS;
    uint64_t state = FUZZ_SEED + rounds;
    for (int kind = 0; kind < ALL_KINDS; kind++) {
        make_cache(kind);
        const size_t kept = kind & PACKED ? make_packed(valid) : make_run(valid),
                     n = kind & PACKED ? kept : NOMINAL;
        free_cache();
        data[0] = (uint8_t)kind;
        memcpy(data + 1, valid, n);
        require_valid(data, n + 1, kind);
        for (unsigned long i = 0; i < rounds; i++) {
            size_t length = kept;
            memcpy(data + 1, valid, n);
            /* heads and lists are short; the head of the first run of a packed state is behind the
             * other bytes */
            const size_t at = kind & PACKED && i % 2 ? kept - 3 * (kept / 4) : 0;
            length -= at;
            fuzz_mutate(data + 1 + at, &length, 200, 4, &state);
            LLVMFuzzerTestOneInput(data, 1 + (length + at == kept ? n : length + at));
        }
    }
    printf("%lu mutated states: refused, or restored\n", ALL_KINDS * rounds);
    return 0;
}
#endif
