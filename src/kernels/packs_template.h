/* packs_template.h - the kernels of packs.h for any vector width. The file of each level includes
 * it and defines
 *
 *   PACK_BYTES           bytes of a vector: 16, 32 or 64
 *   PACK_TILE            queries whose sums stay in registers: 2 PACK_TILE vectors
 *   PACK_BIASED(bits)    whether the first operand of products is unsigned: levels plus the bias
 *   pack_bytes, pack_sums                vectors of bytes and of 32-bit sums
 *   pack_load(p), pack_store(p, sums)    aligned to the vector
 *   pack_set(n)                          a sum in every lane
 *   pack_table(bytes)                    16 bytes, for pack_look_up
 *   pack_look_up(table, v, shift)        table[(v >> shift) % 16] of every byte; shift is constant
 *   pack_look_up_two(table, low, shift, high, high_shift)
 *                                        the same for 2 low bits and a high bit
 *   pack_whole(v)                        8-bit codes to operands
 *   pack_add(sums, operands, n, fold, x, step)
 *                                        adds n products of operands[i] and the 4 bytes at
 *                                        x + i * step; n and fold are constants of at most 4, and
 *                                        2 fold products of this width fit 16 bits
 *   pack_add_whole(sums, operand, x)     the same for 8-bit codes
 *   pack_finish(a, b)                    the sums of two sets
 */
#define PACK_PARTS (KVANT_PACK_CHUNK / PACK_BYTES) /* vectors per chunk */
#define PACK_LANES (PACK_BYTES / 4)

/* Unpacks the operands of one half of a step of quads. at: the vector `part` of the step's first
 * chunk. bits and half are constants. */
KVANT_INLINE void NAME(pack_operands)(uint32_t bits, uint32_t half, pack_bytes table,
                                      const uint8_t *at, pack_bytes *operand)
{
    if (bits == 8) {
        operand[0] = pack_whole(pack_load(at + half * KVANT_PACK_CHUNK));
    } else if (bits == 3) {
        const pack_bytes high = pack_load(at + 2 * KVANT_PACK_CHUNK);
        unrolled_for (uint32_t q = 0; q < 4; q++)
            operand[q] = pack_look_up_two(table, pack_load(at + q / 2 * KVANT_PACK_CHUNK),
                                          2 * (q % 2 * 2 + half), high, 2 * q + half);
    } else {
        unrolled_for (uint32_t q = 0; q < 4 / bits; q++)
            operand[q] = pack_look_up(table, pack_load(at), bits * (2 * q + half));
    }
}

/* Multiplies vector `part` of all chunks by n queries from `first` on. bits and n are constants.
 * With few queries, two sets of sums hide the latency of the products. */
KVANT_INLINE void NAME(pack_part)(uint32_t bits, uint32_t n, uint32_t ways,
                                  const kvant_pack_format *format, const uint8_t *codes,
                                  const kvant_pack_queries *queries, uint32_t first, uint32_t part,
                                  pack_bytes table, int32_t *dots)
{
    const uint32_t quads = bits == 3 ? 4 : bits < 4 ? 4 / bits : 1; /* quads of a step */
    const size_t step = (size_t)queries->n * 4;
    const int8_t *x = queries->x + (size_t)first * 4;
    const uint8_t *at = codes + (size_t)part * PACK_BYTES;
    pack_sums sum[2][PACK_TILE][2];
    unrolled_for (uint32_t i = 0; i < n; i++) {
        const int32_t bias =
            PACK_BIASED(bits) ? -(int32_t)format->bias * queries->sums[first + i] : 0;
        unrolled_for (uint32_t half = 0; half < 2; half++) {
            sum[0][i][half] = pack_set(bias);
            sum[1][i][half] = pack_set(0);
        }
    }
    const uint32_t n_steps = format->n_quads / quads;
    for (uint32_t s = 0; s < n_steps; s += ways)
        unrolled_for (uint32_t way = 0; way < ways; way++) {
            if (s + way >= n_steps)
                break;
            unrolled_for (uint32_t half = 0; half < 2; half++) {
                pack_bytes operand[4];
                NAME(pack_operands)(bits, half, table, at, operand);
                unrolled_for (uint32_t i = 0; i < n; i++)
                    sum[way][i][half] =
                        bits == 8 ? pack_add_whole(sum[way][i][half], operand[0], x + 4 * i)
                                  : pack_add(sum[way][i][half], operand, quads,
                                             bits == 3 ? 2 : quads, x + 4 * i, step);
            }
            at += quads * bits * 16;
            x += quads * step;
        }
    unrolled_for (uint32_t i = 0; i < n; i++)
        unrolled_for (uint32_t half = 0; half < 2; half++)
            pack_store(dots + (size_t)(first + i) * KVANT_PACK_VECTORS + half * 16 +
                           part * PACK_LANES,
                       pack_finish(sum[0][i][half], sum[1][i][half]));
}

KVANT_INLINE void NAME(pack_tile)(uint32_t bits, uint32_t n, uint32_t ways,
                                  const kvant_pack_format *format, const uint8_t *codes,
                                  const kvant_pack_queries *queries, uint32_t first,
                                  pack_bytes table, int32_t *dots)
{
    for (uint32_t part = 0; part < PACK_PARTS; part++)
        NAME(pack_part)(bits, n, ways, format, codes, queries, first, part, table, dots);
}

KVANT_INLINE void NAME(pack_width)(uint32_t bits, const kvant_pack_format *format,
                                   const uint8_t *codes, const kvant_pack_queries *queries,
                                   int32_t *dots)
{
    uint8_t entries[16];
    uint32_t i = 0;
    for (uint32_t code = 0; code < 16; code++)
        entries[code] = (uint8_t)(format->levels[code % (1u << bits % 8)] +
                                  (PACK_BIASED(bits) ? format->bias : 0));
    const pack_bytes table = pack_table(entries);
    for (; i + PACK_TILE <= queries->n; i += PACK_TILE)
        NAME(pack_tile)(bits, PACK_TILE, 1, format, codes, queries, i, table, dots);
    for (; i + 2 <= queries->n; i += 2)
        NAME(pack_tile)(bits, 2, 1, format, codes, queries, i, table, dots);
    if (i < queries->n)
        NAME(pack_tile)(bits, 1, 2, format, codes, queries, i, table, dots);
}

static KVANT_PACK_DOTS_FN(NAME(pack_dots))
{
    switch (format->bits) {
    case 1: NAME(pack_width)(1, format, codes, queries, dots); return;
    case 2: NAME(pack_width)(2, format, codes, queries, dots); return;
    case 3: NAME(pack_width)(3, format, codes, queries, dots); return;
    case 4: NAME(pack_width)(4, format, codes, queries, dots); return;
    default: NAME(pack_width)(8, format, codes, queries, dots); return;
    }
}
