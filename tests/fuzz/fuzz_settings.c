/* fuzz_settings.c - any bytes as a settings file: it is refused with a message or it is usable, and
 * no read leaves it. Usable settings that are written read back equal. For libFuzzer (clang
 * -fsanitize=fuzzer). With KVANT_FUZZ_SMOKE it is a program that mutates a valid file itself, a
 * fixed number of times.
 *
 * The input is the file without its last line. The checksum in that line would refuse nearly every
 * mutation at once, so the program computes it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/base/alloc.h"
#include "../../src/base/fnv.h"
#include "../../src/settings/settings_internal.h"

/* Aborts if the layers are not equal. */
static void compare(const kvant_settings *a, const kvant_settings *b)
{
    if (a->n_layers != b->n_layers || strcmp(a->model, b->model) != 0 ||
        strcmp(a->calibration, b->calibration) != 0 || a->model_fingerprint != b->model_fingerprint)
        abort();
    for (uint32_t i = 0; i < 2 * a->n_layers; i++) {
        if (a->entries[i].n_specs != b->entries[i].n_specs)
            abort();
        for (uint32_t index = 0; index < a->entries[i].n_specs; index++)
            if (!kvant_settings_same(&a->entries[i], index, &b->entries[i], index))
                abort();
    }
}

static void come_back(const kvant_settings *settings)
{
    kvant_settings *again = kvant_alloc(1, sizeof *again);
    char *text = NULL;
    size_t n;
    if (!again || kvant_settings_format(settings, &text, &n, NULL) != KVANT_OK ||
        kvant_settings_parse(again, text, n, NULL) != KVANT_OK)
        abort();
    compare(settings, again);
    kvant_free(text);
    kvant_settings_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n); /* libFuzzer's name */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char err[256] = "";
    kvant_error error = { err, sizeof err };
    kvant_settings *settings = kvant_alloc(1, sizeof *settings);
    char *text = malloc(n + 23); /* its exact size, so that a sanitiser sees any access beyond it */
    char check[24];
    if (!settings || !text)
        abort();
    snprintf(check, sizeof check, "check %016llx\n",
             (unsigned long long)kvant_fnv1a(KVANT_FNV_START, data, n));
    memcpy(text, data, n);
    memcpy(text + n, check, 23);
    if (kvant_settings_parse(settings, text, n + 23, &error) == KVANT_OK)
        come_back(settings);
    else if (!err[0])
        abort();
    free(text);
    kvant_settings_free(&settings);
    return 0;
}

#ifdef KVANT_FUZZ_SMOKE
#include "mutate.h"

#define ROUNDS 50000u

static const char valid[] = "kvant-settings 1\n"
                            "model A Model 135M\n"
                            "fingerprint 0123456789abcdef\n"
                            "layers 12\n"
                            "calibration fedcba9876543210 a model.kvcal\n"
                            "k 0,2-10 3x64 trellis-4:transform=file\n"
                            "k 1,11/0,11/2 3x64 f16\n"
                            "k 11/1 3x64 turboquant-3:center=file\n"
                            "v 0-11 3x64 turboquant-3:center=file\n";

/* Bytes that are special to the parser, flipped bits, pieces that are lost or repeated. */
static size_t mutate(char *text, size_t n, uint64_t *state)
{
    static const char words[] = "0193-,/x \n:=kvac\r\x7f\xff";
    for (uint64_t left = fuzz_next(state) % 4 + 1; left; left--) {
        size_t at = fuzz_next(state) % n, length = fuzz_next(state) % (n - at) % 40;
        switch (fuzz_next(state) % 4) {
        case 0: text[at] = (char)(text[at] ^ 1 << fuzz_next(state) % 8); break;
        case 1: text[at] = words[fuzz_next(state) % (sizeof words - 1)]; break;
        case 2:
            memmove(text + at, text + at + length, n - at - length);
            n -= length;
            break;
        default: memmove(text + at + length, text + at, n - at); n += length;
        }
    }
    return n;
}

int main(void)
{
    static char text[sizeof valid + 4 * 40];
    uint64_t state = FUZZ_SEED;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        memcpy(text, valid, sizeof valid - 1);
        LLVMFuzzerTestOneInput((const uint8_t *)text, mutate(text, sizeof valid - 1, &state));
    }
    printf("%u mutated files: none read beyond its end\n", ROUNDS);
    return 0;
}
#endif
