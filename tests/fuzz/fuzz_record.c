/* fuzz_record.c - any bytes as a record of several blocks, with transforms, W, centres of blocks
 * and shifts. The record is refused and the tensor is as before, or it is imported and every
 * operation on the tensor works with it. A caller that reads the record for pages elsewhere
 * (record_outer.c) gets the same answer. For libFuzzer (clang -fsanitize=fuzzer). With
 * KVANT_FUZZ_SMOKE it is a program that mutates valid records itself, a fixed number of times.
 * fuzz_import.c has records of one block.
 *
 * The input is one byte that picks a scheme, then the record without its checksum. The program sets
 * the fields of the head that would refuse nearly every mutation at once, and the checksum. */
#include <kvant/tensor_hooks.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/base/fnv.h"
#include "../../src/cache/record.h"
#include "../../src/cache/transform_bytes.h"
#include "attend.h"
#include "mutate.h"

enum {
    HEADS = 2,
    DIM = 16,
    WIDTH = HEADS * DIM,
    BLOCKS = 13,
    TOKENS = 740, /* 12 blocks, of which the last has 36 rows */
    N = (TOKENS + 63) / 64,
    BATCH = 128
};

static const struct {
    const char *spec;
    int exact;     /* the first and the newest rows are fp16 */
    int32_t shift; /* of the rows in the valid record */
} schemes[] = {
    { "trellis-4:transform=first", 1, -77 },
    { "turboquant-4:transform=first", 0, 0 },
    { "turboquant-3:transform=first", 1, 0 },
    { "trellis-3:center=first,norm=first", 1, 5 },
    { "int-4:axis=channel,group=32,recent=100,sink=4", 0, 9 },
    { "f16", 0, -1 },
};
#define N_SCHEMES (sizeof schemes / sizeof *schemes)

typedef struct keys {
    kvant_codec *codec, *value_codec;
    kvant_tensor *tensor, *values;
    void *memory, *value_memory;
    size_t bytes;
} keys;

static void require_at(int condition, int line)
{
    if (condition)
        return;
    fprintf(stderr, "fuzz_record.c:%d: not as it has to be: %s\n", line, kvant_error_message());
    abort();
}

#define require(condition) require_at(condition, __LINE__)

static const float *frequencies(void)
{
    static float f[DIM / 2];
    for (int i = 0; i < DIM / 2; i++)
        f[i] = powf(10000, -(float)i / (DIM / 2));
    return f;
}

static kvant_rope rope(void)
{
    return (kvant_rope){ .size = sizeof(kvant_rope),
                         .n_dims = 12,
                         .frequencies = frequencies(),
                         .n_positions = 64 * BLOCKS,
                         .block_centers = 1 };
}

static kvant_tensor *make_tensor(const kvant_codec *codec, int exact, void **memory, size_t *bytes)
{
    static const kvant_exact_part usual = {
        .size = sizeof usual, .first = 64, .newest = 128, .total = 192, .step = BATCH
    };
    const kvant_codec *const codecs[HEADS] = { codec, codec };
    const kvant_tensor_params params = { .size = sizeof params,
                                         .codecs = codecs,
                                         .n_kv_heads = HEADS,
                                         .n_sequences = 1,
                                         .n_blocks = BLOCKS,
                                         .exact = exact ? &usual : NULL };
    kvant_tensor *tensor;
    require(kvant_tensor_size(&params, bytes) == KVANT_OK);
    *memory = aligned_alloc(64, (*bytes + 63) / 64 * 64);
    require(*memory != NULL);
    memset(*memory, 0, *bytes);
    require(kvant_tensor_create(&params, *memory, &tensor) == KVANT_OK);
    return tensor;
}

static keys make_keys(size_t scheme)
{
    const kvant_rope r = rope();
    keys k = { .codec = NULL };
    size_t bytes;
    require(kvant_codec_create(schemes[scheme].spec, DIM, KVANT_ROLE_K, 1, &k.codec, NULL, 0) ==
                KVANT_OK &&
            kvant_codec_create("f16", DIM, KVANT_ROLE_V, 1, &k.value_codec, NULL, 0) == KVANT_OK);
    k.tensor = make_tensor(k.codec, schemes[scheme].exact, &k.memory, &k.bytes);
    k.values = make_tensor(k.value_codec, 0, &k.value_memory, &bytes);
    require(kvant_tensor_set_rope(k.tensor, &r) == KVANT_OK);
    return k;
}

static void free_keys(keys *k)
{
    kvant_tensor_free(&k->tensor);
    kvant_tensor_free(&k->values);
    kvant_codec_free(&k->codec);
    kvant_codec_free(&k->value_codec);
    free(k->memory);
    free(k->value_memory);
}

static float number(uint64_t *state)
{
    return (float)(int32_t)(fuzz_next(state) >> 33) / 1e9f;
}

/* Writes rows with queries, from which transform=first learns. */
static kvant_status write_rows(kvant_tensor *tensor, uint32_t first, uint32_t n, uint64_t seed)
{
    static float rows[BATCH * WIDTH], queries[BATCH * WIDTH];
    int64_t slots[BATCH];
    int32_t positions[BATCH];
    uint64_t state = FUZZ_SEED + seed;
    const kvant_queries q = { .size = sizeof q,
                              .q = queries,
                              .token_stride = WIDTH,
                              .head_stride = DIM,
                              .n_tokens = n,
                              .n_heads = HEADS,
                              .positions = positions };
    for (uint32_t i = 0; i < n * WIDTH; i++) {
        rows[i] = number(&state) + (float)(i % 5);
        queries[i] = number(&state) * (float)(1 + i % 3);
    }
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = first + i;
        positions[i] = (int32_t)(first + i);
    }
    require(kvant_tensor_note_queries(tensor, &q, 1) == KVANT_OK &&
            kvant_tensor_next_positions(tensor, positions, n) == KVANT_OK);
    return kvant_tensor_write(tensor, slots, n, rows, WIDTH, 1);
}

static void write_text(kvant_tensor *tensor)
{
    for (uint32_t i = 0; i < TOKENS; i += BATCH)
        require(write_rows(tensor, i, TOKENS - i < BATCH ? TOKENS - i : BATCH, i) == KVANT_OK);
}

static void list_blocks(kvant_block_slots *blocks)
{
    for (uint32_t i = 0; i < N; i++)
        blocks[i] =
            (kvant_block_slots){ i + 1 < N ? UINT64_MAX : ((uint64_t)1 << TOKENS % 64) - 1, i };
}

static uint8_t *export_all(const kvant_tensor *tensor, size_t *bytes)
{
    kvant_block_slots all[N];
    list_blocks(all);
    require(kvant_tensor_record_size(tensor, all, N, bytes) == KVANT_OK);
    uint8_t *data = malloc(*bytes);
    require(data && kvant_tensor_export_record(tensor, all, N, data, *bytes, 1) == KVANT_OK);
    return data;
}

/* A shift may be refused: there may be too many, or it may end beyond the largest one. */
static void shift_rows(kvant_tensor *tensor, int32_t by)
{
    const kvant_rope r = rope();
    int32_t all[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++)
        all[i] = i % 100 ? by : 0;
    (void)kvant_tensor_shift(tensor, &r, all, TOKENS, 1);
}

/* A record that was imported comes out of the tensor, and an empty tensor that imports this record
 * gives the same bytes again. */
static void go_round(const keys *k, size_t scheme)
{
    kvant_block_slots all[N];
    keys other = make_keys(scheme);
    size_t bytes, again;
    uint8_t *data = export_all(k->tensor, &bytes), *twice;
    list_blocks(all);
    require(kvant_tensor_import_record(other.tensor, all, N, data, bytes, 1) == KVANT_OK);
    twice = export_all(other.tensor, &again);
    require(again == bytes && memcmp(data, twice, bytes) == 0);
    free(data);
    free(twice);
    free_keys(&other);
}

/* Rows next to imported ones may be beyond fp16 with the imported transform. */
static void write_or_refuse(kvant_tensor *tensor, uint32_t first, uint32_t n)
{
    const kvant_status status = write_rows(tensor, first, n, 3);
    require(status == KVANT_OK || status == KVANT_ERR_RANGE);
}

static void use_rows(const keys *k, size_t scheme)
{
    static float rows[TOKENS * WIDTH];
    require(kvant_tensor_read(k->tensor, 0, TOKENS, rows, WIDTH) == KVANT_OK);
    require(fuzz_attend(k->tensor, k->values, TOKENS, DIM));
    go_round(k, scheme);
    shift_rows(k->tensor, 40);
    shift_rows(k->tensor, 1 << 30);
    shift_rows(k->tensor, -(1 << 30));
    require(fuzz_attend(k->tensor, k->values, TOKENS, DIM));
    write_or_refuse(k->tensor, TOKENS - 3, 9);
    write_or_refuse(k->tensor, 130, 2);
    write_or_refuse(k->tensor, 256, BATCH);
    require(fuzz_attend(k->tensor, k->values, TOKENS, DIM));
    require(kvant_tensor_clear_blocks(k->tensor, 3, 2) == KVANT_OK);
    write_or_refuse(k->tensor, 192, BATCH);
    require(kvant_tensor_read(k->tensor, 0, TOKENS, rows, WIDTH) == KVANT_OK);
}

/* Copies the pages of all blocks that were read to a record of pages elsewhere. It is a valid
 * record, or it cannot be written because codes share their scales. */
static void write_again(kvant_tensor *tensor, kvant_outer_block *from, const void **transforms)
{
    kvant_outer_block to[N];
    kvant_tensor_info info = { .size = sizeof info };
    const kvant_rope r = rope();
    kvant_outer_record record = {
        .blocks = to, .n_blocks = N, .transforms = transforms, .rope = &r
    };
    kvant_block_slots all[N];
    size_t bytes;
    list_blocks(all);
    require(kvant_tensor_get_info(tensor, &info) == KVANT_OK);
    for (uint32_t i = 0; i < N; i++) {
        to[i] = from[i];
        if (from[i].shift == KVANT_ANY_SHIFT)
            to[i].shift = 0;
        if (from[i].transform >= record.n_transforms)
            record.n_transforms = from[i].transform + 1;
    }
    const kvant_status status = kvant_tensor_outer_size(tensor, &record, &bytes);
    require(status == KVANT_OK || status == KVANT_ERR_UNSUPPORTED);
    if (status != KVANT_OK)
        return;
    uint8_t *data = malloc(bytes);
    require(data && kvant_tensor_outer_begin(tensor, &record, data, bytes) == KVANT_OK);
    for (uint32_t i = 0; i < N; i++) {
        if (to[i].rows)
            memcpy(to[i].rows, from[i].rows, info.open_bytes);
        if (to[i].codes)
            memcpy(to[i].codes, from[i].codes, info.sealed_bytes);
    }
    require(kvant_tensor_outer_end(tensor, &record, data, bytes) == KVANT_OK);
    kvant_tensor_clear(tensor);
    require(kvant_tensor_import_record(tensor, all, N, data, bytes, 1) == KVANT_OK);
    free(data);
}

/* Reads the record for pages elsewhere, and gives its transforms to an empty block one by one. */
static void read_elsewhere(size_t scheme, const uint8_t *data, size_t bytes, bool imported)
{
    const void *transforms[KVANT_MAX_TRANSFORMS];
    kvant_outer_block blocks[N];
    kvant_block_slots all[N];
    keys k = make_keys(scheme);
    list_blocks(all);
    const kvant_status status =
        kvant_tensor_read_outer(k.tensor, all, N, data, bytes, 0, blocks, transforms);
    require(status == KVANT_OK || !imported);
    if (status == KVANT_OK) {
        uint32_t n = 0;
        for (uint32_t i = 0; i < N; i++)
            n = blocks[i].transform >= n ? blocks[i].transform + 1 : n;
        for (uint32_t i = 0; i < n; i++) {
            uint8_t *again = malloc(kvant_tensor_transform_size(k.tensor));
            size_t used;
            require(again != NULL);
            if (kvant_tensor_set_transform(k.tensor, BLOCKS - 1, transforms[i], 1) == KVANT_OK)
                require(kvant_tensor_get_transform(k.tensor, BLOCKS - 1, again, &used) == KVANT_OK);
            else
                require(!imported);
            free(again);
        }
        if (imported)
            write_again(k.tensor, blocks, transforms);
    }
    free_keys(&k);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n); /* libFuzzer's name */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const uint64_t magic = KVANT_RECORD_MAGIC;
    const uint32_t n_blocks = N;
    kvant_block_slots all[N];
    uint64_t check, scheme;
    if (n < 2)
        return 0;
    const size_t which = data[0] / 2 % N_SCHEMES, bytes = n - 1 + sizeof check;
    keys k = make_keys(which);
    /* its exact size, so that a sanitiser sees any access beyond it */
    uint8_t *record = malloc(bytes), *before = NULL, *after = NULL;
    size_t before_bytes = 0, after_bytes;
    require(record != NULL);
    memcpy(record, data + 1, n - 1);
    scheme = kvant_tensor_scheme(k.tensor);
    if (n - 1 >= sizeof(kvant_record_header)) {
        const uint64_t size = bytes;
        memcpy(record, &magic, sizeof magic);
        memcpy(record + 8, &size, sizeof size);
        memcpy(record + 16, &scheme, sizeof scheme);
        memcpy(record + 24, &n_blocks, sizeof n_blocks);
    }
    check = kvant_checksum_of(record, n - 1);
    memcpy(record + n - 1, &check, sizeof check);
    list_blocks(all);
    if (data[0] % 2) {
        write_text(k.tensor);
        before = export_all(k.tensor, &before_bytes);
    }
    require(write_rows(k.values, 0, 100, 1) == KVANT_OK);
    const kvant_status status = kvant_tensor_import_record(k.tensor, all, N, record, bytes, 1);
    if (status != KVANT_OK && before) {
        after = export_all(k.tensor, &after_bytes);
        require(after_bytes == before_bytes && memcmp(after, before, after_bytes) == 0);
    }
    if (status == KVANT_OK)
        use_rows(&k, which);
    read_elsewhere(which, record, bytes, status == KVANT_OK && !before);
    free(before);
    free(after);
    free(record);
    free_keys(&k);
    return 0;
}

#ifdef KVANT_FUZZ_SMOKE
#define ROUNDS 60u /* for each scheme */

/* Places of a valid record that decide how the rest is read. */
typedef struct places {
    size_t at[64], bytes[64];
    size_t n;
} places;

static void add(places *p, size_t at, size_t bytes)
{
    require(p->n < 64);
    p->at[p->n] = at;
    p->bytes[p->n++] = bytes;
}

static places find_places(const kvant_tensor *tensor, const uint8_t *data, size_t bytes)
{
    places p = { .n = 0 };
    kvant_record_header head;
    size_t at = sizeof head;
    memcpy(&head, data, sizeof head);
    add(&p, 28, 4);
    for (uint32_t i = 0; i < head.n_transforms; i++) {
        kvant_record_transform transform;
        memcpy(&transform, data + at, sizeof transform);
        add(&p, at, sizeof transform);
        add(&p, at, sizeof transform + kvant_transform_bytes(tensor, transform.kind));
        if (transform.kind == KVANT_BYTES_CENTERS)
            add(&p, at + sizeof transform + kvant_transform_bytes(tensor, KVANT_BYTES_MATRICES),
                8 + DIM / 2 * sizeof(float));
        at += sizeof transform + kvant_transform_bytes(tensor, transform.kind);
    }
    for (uint32_t i = 0; i < head.n_blocks; i++) {
        kvant_record_block block;
        memcpy(&block, data + at, sizeof block);
        add(&p, at, sizeof block);
        if (block.form & KVANT_SHIFTED)
            add(&p, at + sizeof block, kvant_record_shift_bytes(tensor, &block));
        at += sizeof block + kvant_record_body_bytes(tensor, &block);
    }
    require(at == bytes - sizeof(uint64_t));
    return p;
}

/* Special numbers of fp16, binary32 and integers, flipped bits, cut ends. */
static size_t mutate(uint8_t *record, size_t n, const places *p, uint64_t *state)
{
    static const uint8_t odd[] = { 0x00, 0x7c, 0xfc, 0x7e, 0xff, 0x7f, 0x80, 0x01 };
    for (uint64_t left = fuzz_next(state) % 3 + 1; left; left--) {
        const size_t place = fuzz_next(state) % p->n,
                     at = fuzz_next(state) % 4 ? p->at[place] + fuzz_next(state) % p->bytes[place]
                                               : fuzz_next(state) % n;
        switch (fuzz_next(state) % 4) {
        case 0: record[at] = (uint8_t)(record[at] ^ 1 << fuzz_next(state) % 8); break;
        case 1: record[at] = odd[fuzz_next(state) % sizeof odd]; break;
        case 2:
            memset(record + at, odd[fuzz_next(state) % sizeof odd],
                   n - at < 4 ? n - at : 1 + fuzz_next(state) % 4);
            break;
        default:
            memmove(record + at, record + p->at[fuzz_next(state) % p->n], n - at < 4 ? n - at : 4);
        }
    }
    return fuzz_next(state) % 16 ? n : n - 8 * (fuzz_next(state) % (n / 8));
}

int main(int argc, char **argv)
{
    const unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : ROUNDS;
    uint64_t state = FUZZ_SEED + rounds, imported = 0;
    for (size_t scheme = 0; scheme < N_SCHEMES; scheme++) {
        kvant_block_slots all[N];
        keys k = make_keys(scheme), other = make_keys(scheme);
        size_t bytes;
        list_blocks(all);
        write_text(k.tensor);
        if (schemes[scheme].shift)
            shift_rows(k.tensor, schemes[scheme].shift);
        uint8_t *valid = export_all(k.tensor, &bytes), *data = malloc(bytes + 1);
        const size_t n = bytes - sizeof(uint64_t);
        const places p = find_places(k.tensor, valid, bytes);
        require(data != NULL);
        imported += kvant_tensor_import_record(other.tensor, all, N, valid, bytes, 1) == KVANT_OK;
        for (unsigned long i = 0; i < rounds; i++) {
            data[0] = (uint8_t)(2 * scheme + i % 2);
            memcpy(data + 1, valid, n);
            /* the first two rounds have the valid record */
            LLVMFuzzerTestOneInput(data, 1 + (i < 2 ? n : mutate(data + 1, n, &p, &state)));
        }
        free(valid);
        free(data);
        free_keys(&k);
        free_keys(&other);
    }
    require(imported == N_SCHEMES);
    printf("%lu mutated records: refused, or usable\n", N_SCHEMES * rounds);
    return 0;
}
#endif
