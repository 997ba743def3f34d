/* format.c - see format.h. */
#include "format.h"

#include "../base/half.h"

/* A codebook of ggml (kvalues_iq4nl). */
const int8_t kvant_iq4_nl_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113 };

size_t kvant_block_row_bytes(kvant_block_type type, uint32_t head_dim)
{
    kvant_block_format format = kvant_block_format_of(type);
    if (!format.numbers || !head_dim || head_dim > KVANT_BLOCK_MAX_HEAD_DIM ||
        head_dim % format.numbers)
        return 0;
    return (size_t)head_dim / format.numbers * format.bytes;
}

static uint32_t little_endian(const uint8_t *p, uint32_t bytes)
{
    uint32_t x = 0;
    for (uint32_t i = 0; i < bytes; i++)
        x |= (uint32_t)p[i] << 8 * i;
    return x;
}

static float half_at(const uint8_t *p)
{
    return kvant_half_to_float((uint16_t)little_endian(p, 2));
}

/* Number i of a block as an integer. */
static int32_t code_at(kvant_block_type type, const kvant_block_format *format,
                       const uint8_t *block, uint32_t i)
{
    uint32_t code = (uint32_t)block[format->codes + i % 16] >> (i < 16 ? 0 : 4) & 15u;
    if (format->has_fifths)
        code |= (little_endian(block + format->fifths, 4) >> i & 1u) << 4;
    switch (type) {
    case KVANT_BLOCK_Q8_0: return (int8_t)block[format->codes + i];
    case KVANT_BLOCK_IQ4_NL: return kvant_iq4_nl_values[code];
    case KVANT_BLOCK_Q4_0: return (int32_t)code - 8;
    case KVANT_BLOCK_Q5_0: return (int32_t)code - 16;
    default: return (int32_t)code;
    }
}

void kvant_block_decode(kvant_block_type type, const uint8_t *row, uint32_t n, float *x)
{
    kvant_block_format format = kvant_block_format_of(type);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *block = row + (size_t)(i / format.numbers) * format.bytes;
        uint32_t at = i % format.numbers;
        switch (type) {
        case KVANT_BLOCK_F32: x[i] = kvant_float_from_bits(little_endian(block + 4 * at, 4)); break;
        case KVANT_BLOCK_F16: x[i] = half_at(block + 2 * at); break;
        case KVANT_BLOCK_BF16:
            x[i] = kvant_bf16_to_float((uint16_t)little_endian(block + 2 * at, 2));
            break;
        default:
            x[i] = half_at(block) * (float)code_at(type, &format, block, at);
            if (format.has_min)
                x[i] += half_at(block + 2);
        }
    }
}
