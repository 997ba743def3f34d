/* fuzz_import.c - any bytes as an exported block. The block is refused and the tensor is as before,
 * or it is imported and every operation on the tensor works with it. For libFuzzer (clang
 * -fsanitize=fuzzer). With KVANT_FUZZ_SMOKE it is a program that mutates valid blocks itself, a
 * fixed number of times.
 *
 * The input is one byte that picks a scheme, then the block without its checksum. The checksum
 * would refuse nearly every mutation at once, so the program computes it, and also sets the fields
 * magic, bytes and scheme of the header and the number of blocks. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/base/fnv.h"
#include "attend.h"
#include "mutate.h"

enum { HEADS = 2, DIM = 16, WIDTH = HEADS * DIM, BLOCKS = 6, TOKENS = 150, HEADER = 40 };

static const char *const specs[] = { "turboquant-3:center=first,norm=first,recent=64",
                                     "int-4:axis=channel,group=32,sink=4",
                                     "trellis-3",
                                     "int-2:norm=first",
#if KVANT_PAPERS
                                     "octopus-3:center=first",
                                     "polar-3:recent=32"
#endif
};
#define N_SPECS (sizeof specs / sizeof *specs)

typedef struct room {
    kvant_codec *codecs[2];
    kvant_tensor *tensors[2]; /* keys, values */
    uint8_t *memory[2], *kept;
    size_t bytes;
} room;

static void require(int condition)
{
    if (!condition)
        abort();
}

static float number(uint64_t *state)
{
    return (float)(int32_t)(fuzz_next(state) >> 33) / 1e9f;
}

static kvant_status try_rows(kvant_tensor *tensor, int64_t first, uint32_t n, float shift)
{
    static float rows[TOKENS * WIDTH];
    int64_t slots[TOKENS];
    uint64_t state = FUZZ_SEED;
    for (uint32_t i = 0; i < n * WIDTH; i++)
        rows[i] = number(&state) + shift;
    for (uint32_t i = 0; i < n; i++)
        slots[i] = first + i;
    return kvant_tensor_write(tensor, slots, n, rows, WIDTH, 1);
}

static void write_rows(kvant_tensor *tensor, int64_t first, uint32_t n, float shift)
{
    require(try_rows(tensor, first, n, shift) == KVANT_OK);
}

/* Rows that are far from an imported centre, or under a tiny scale, may be beyond fp16. */
static void write_or_refuse(kvant_tensor *tensor, int64_t first, uint32_t n, float shift)
{
    kvant_status status = try_rows(tensor, first, n, shift);
    require(status == KVANT_OK || status == KVANT_ERR_RANGE);
}

static room make_room(const char *spec)
{
    room r = { 0 };
    for (int role = 0; role < 2; role++) {
        require(kvant_codec_create(spec, DIM, (kvant_role)role, 1, &r.codecs[role], NULL, 0) ==
                KVANT_OK);
        const kvant_codec *const codecs[HEADS] = { r.codecs[role], r.codecs[role] };
        const kvant_tensor_params params = { .size = sizeof params,
                                             .codecs = codecs,
                                             .n_kv_heads = HEADS,
                                             .n_sequences = 1,
                                             .n_blocks = BLOCKS };
        require(kvant_tensor_size(&params, &r.bytes) == KVANT_OK);
        r.memory[role] = aligned_alloc(64, r.bytes);
        require(r.memory[role] != NULL);
        memset(r.memory[role], 0, r.bytes);
        require(kvant_tensor_create(&params, r.memory[role], &r.tensors[role]) == KVANT_OK);
    }
    r.kept = malloc(r.bytes);
    return r;
}

static void free_room(room *r)
{
    for (int role = 0; role < 2; role++) {
        kvant_tensor_free(&r->tensors[role]);
        kvant_codec_free(&r->codecs[role]);
        free(r->memory[role]);
    }
    free(r->kept);
}

/* Reads, exports and imports again, attends, rewrites (which makes blocks exact and seals them),
 * copies, clears. */
static void use_block(room *r, uint32_t block, const uint8_t *data, size_t n)
{
    kvant_tensor *tensor = r->tensors[0];
    static float rows[64 * WIDTH];
    size_t most = kvant_tensor_export_size(tensor), used;
    uint8_t *again = malloc(most), *twice = malloc(most);
    kvant_block_info info = { .size = sizeof info };
    require(kvant_tensor_get_block(tensor, block, 0, &info) == KVANT_OK);
    require(again && twice && kvant_tensor_export(tensor, block, again, most, &used) == KVANT_OK);
    if (info.written) { /* bits of slots that are not written are not exported */
        require(used == n && memcmp(again, data, HEADER) == 0);
        require(kvant_tensor_import(tensor, block, again, n) == KVANT_OK);
        require(kvant_tensor_export(tensor, block, twice, most, &used) == KVANT_OK);
        require(used == n && memcmp(again, twice, n) == 0);
    }
    free(again);
    free(twice);
    require(kvant_tensor_read(tensor, block * 64, 64, rows, WIDTH) == KVANT_OK);
    require(fuzz_attend(r->tensors[0], r->tensors[1], 64 * BLOCKS, DIM));
    write_or_refuse(tensor, block * 64 + 5, 3, 0);
    write_or_refuse(tensor, block * 64 + 40, 1, 3);
    write_or_refuse(tensor, 0, TOKENS, 2);
    require(fuzz_attend(r->tensors[0], r->tensors[1], 64 * BLOCKS, DIM));
    (void)kvant_tensor_copy(tensor, block, tensor, BLOCKS - 1, block + 1 < BLOCKS);
    write_or_refuse(tensor, 64 * (BLOCKS - 1), 64, 0);
    require(fuzz_attend(r->tensors[0], r->tensors[1], 64 * BLOCKS, DIM));
    require(kvant_tensor_clear_blocks(tensor, block, 1) == KVANT_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n); /* libFuzzer's name */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    uint64_t check, bytes = n - 1 + sizeof check, used;
    if (n < 2)
        return 0;
    room r = make_room(specs[data[0] / 2 % N_SPECS]);
    /* its exact size, so that a sanitiser sees any access beyond it */
    uint8_t *block = malloc(bytes);
    require(block != NULL);
    memcpy(block, data + 1, n - 1);
    if (n - 1 >= HEADER) { /* magic and scheme from a block of this tensor */
        uint8_t *own = malloc(kvant_tensor_export_size(r.tensors[0]));
        require(own &&
                kvant_tensor_export(r.tensors[0], 0, own, kvant_tensor_export_size(r.tensors[0]),
                                    &used) == KVANT_OK);
        memcpy(block, own, 8);
        memcpy(block + 8, &bytes, sizeof bytes);
        memcpy(block + 16, own + 16, 12);
        free(own);
    }
    check = kvant_checksum_of(block, n - 1);
    memcpy(block + n - 1, &check, sizeof check);
    write_rows(r.tensors[1], 0, TOKENS, 1);
    if (data[0] % 2)
        write_rows(r.tensors[0], 0, TOKENS, 1);
    memcpy(r.kept, r.memory[0], r.bytes);
    for (uint32_t at = 0; at < 4; at += 3)
        if (kvant_tensor_import(r.tensors[0], at, block, bytes) == KVANT_OK)
            use_block(&r, at, block, bytes);
        else
            require(at > 0 || memcmp(r.kept, r.memory[0], r.bytes) == 0);
    free(block);
    free_room(&r);
    return 0;
}

#ifdef KVANT_FUZZ_SMOKE
#define ROUNDS 100u /* for each scheme and block */

/* Special numbers of fp16 or binary32, flipped bits, cut ends. Most mutations change one place, and
 * half of them are in the header. */
static size_t mutate(uint8_t *data, size_t n, uint64_t *state)
{
    static const uint8_t odd[] = { 0x00, 0x7c, 0xfc, 0x7e, 0xff, 0x7f, 0x80, 0x01 };
    for (uint64_t left = fuzz_next(state) % 4 + 1; left; left--) {
        size_t at = fuzz_next(state) % 2 ? 1 + fuzz_next(state) % HEADER : fuzz_next(state) % n;
        switch (fuzz_next(state) % 4) {
        case 0: data[at] = (uint8_t)(data[at] ^ 1 << fuzz_next(state) % 8); break;
        case 1: data[at] = odd[fuzz_next(state) % sizeof odd]; break;
        case 2:
            memset(data + at, odd[fuzz_next(state) % sizeof odd], n - at < 32 ? n - at : 32);
            break;
        default: n -= fuzz_next(state) % 8 ? 0 : fuzz_next(state) % (n - HEADER - 1) / 2;
        }
        if (n < 2 * HEADER)
            break;
    }
    return n;
}

int main(void)
{
    uint64_t state = FUZZ_SEED, imported = 0;
    for (size_t s = 0; s < 2 * N_SPECS; s++) {
        room r = make_room(specs[s / 2]);
        size_t most = kvant_tensor_export_size(r.tensors[0]), used;
        uint8_t *valid = malloc(most + 1), *data = malloc(most + 1);
        require(valid && data);
        write_rows(r.tensors[0], 0, TOKENS, 1);
        for (uint32_t block = 0; block < 4;
             /* a sink if there are sinks, a sealed block, a block that fills, an empty block */
             block++) {
            valid[0] = (uint8_t)s;
            require(kvant_tensor_export(r.tensors[0], block, valid + 1, most, &used) == KVANT_OK);
            LLVMFuzzerTestOneInput(valid, used + 1 - sizeof(uint64_t));
            imported += kvant_tensor_import(r.tensors[0], block, valid + 1, used) == KVANT_OK;
            for (uint32_t i = 0; i < ROUNDS; i++) {
                memcpy(data, valid, used + 1);
                LLVMFuzzerTestOneInput(data, mutate(data, used + 1 - sizeof(uint64_t), &state));
            }
        }
        free(valid);
        free(data);
        free_room(&r);
    }
    require(imported == 2 * N_SPECS * 4);
    printf("%u mutated blocks: refused, or usable\n", (unsigned)(2 * N_SPECS * 4 * ROUNDS));
    return 0;
}
#endif
