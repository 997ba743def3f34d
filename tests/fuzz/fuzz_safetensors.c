/* fuzz_safetensors.c - any bytes as the header of a safetensors file: refused with a message, or every tensor lies inside the file
 * and has the bytes that its shape says. For libFuzzer (clang -fsanitize=fuzzer); with KVANT_FUZZ_SMOKE it is a program that
 * mutates a valid header itself, a fixed number of times. */
#include <stdlib.h>
#include <string.h>

#include "../../tools/safetensors.h"

#define DATA_BYTES 96u

static void check(const safetensors *s)
{
    uint64_t at = 0;
    for (size_t i = 0; i < s->n; i++) {
        const safetensors_tensor *t = &s->tensors[i];
        uint64_t numbers = 1;
        if (t->n_dims > SAFETENSORS_MAX_DIMS || t->offset != at || t->bytes > DATA_BYTES - at)
            abort();
        for (uint32_t d = 0; d < t->n_dims; d++)
            numbers *= t->shape[d];
        if (numbers > t->bytes || (numbers > 0 && t->bytes % numbers != 0) || safetensors_find(s, t->name) != t)
            abort();
        at += t->bytes;
    }
    if (at != DATA_BYTES)
        abort();
    (void)safetensors_noted(s, "model");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char err[256] = "", *json = malloc(n > 0 ? n : 1); /* of its own size, so that a sanitiser sees the end */
    safetensors s = { .n = 0 };
    if (json == NULL)
        return 0;
    memcpy(json, data, n);
    if (safetensors_parse(&s, json, n, DATA_BYTES, err, sizeof err))
        check(&s);
    else if (!err[0])
        abort();
    safetensors_close(&s);
    free(json);
    return 0;
}

#ifdef KVANT_FUZZ_SMOKE
#include <stdio.h>

#define ROUNDS 40000u

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Digits and punctuation are where lengths and structure are. */
static void mutate(char *text, size_t *n, uint64_t *state)
{
    static const char edges[] = "0123456789-.e{}[],:\"\\ ";
    for (uint64_t left = next(state) % 3 + 1; left > 0; left--) {
        const size_t at = next(state) % *n;
        if (next(state) % 4 == 0)
            text[at] ^= (char)(1u << next(state) % 8);
        else
            text[at] = edges[next(state) % (sizeof edges - 1)];
    }
    if (next(state) % 16 == 0)
        *n = next(state) % *n + 1;
}

int main(void)
{
    static const char valid[] = "{\"__metadata__\":{\"model\":\"m\",\"ctx\":\"96\"},"
                                "\"a\":{\"dtype\":\"F16\",\"shape\":[2,3,4],\"data_offsets\":[0,48]},"
                                "\"b\":{\"dtype\":\"I32\",\"shape\":[4],\"data_offsets\":[48,64]},"
                                "\"c\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[64,65]},"
                                "\"d\":{\"dtype\":\"I8\",\"shape\":[31],\"data_offsets\":[65,96]}}";
    uint64_t state = 88172645463325252u;
    char err[256], text[sizeof valid];
    safetensors s = { .n = 0 };
    if (!safetensors_parse(&s, valid, sizeof valid - 1, DATA_BYTES, err, sizeof err) || s.n != 4)
        return 1;
    check(&s);
    safetensors_close(&s);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        size_t n = sizeof valid - 1;
        memcpy(text, valid, n);
        mutate(text, &n, &state);
        LLVMFuzzerTestOneInput((const uint8_t *)text, n);
    }
    printf("%u mutated headers: none believed against its own sizes\n", ROUNDS);
    return 0;
}
#endif
