/* exact.glsl - arithmetic that an encoder needs bit for bit and that Vulkan does not promise.
 *
 * Vulkan rounds sums, differences and products correctly, but allows a division an error of 2.5
 * units in the last place, and may flush subnormal numbers. So fp16 conversions and divisions use
 * integers. Products and differences need the rounding mode that ROUND_TO_NEAREST declares; the
 * program refuses a device that does not have it. */

/* RoundingModeRTE, 32 bits, of SPV_KHR_float_controls. */
#define ROUND_TO_NEAREST                                                                           \
    spirv_execution_mode(extensions = ["SPV_KHR_float_controls"], capabilities = [4467], 4462, 32)

const uint HALF_MAX_BITS = 0x477fe000u; /* 65504, the largest finite fp16 number, as binary32 */

/* kept + 1 if what was cut off is more than a half of kept's unit, or a half and kept is odd.
 * `rest` are the bits that were cut off, `unit` is their number, `more` says that the value lies
 * above them. */
uint round_to_even(uint kept, uint rest, uint unit, bool more)
{
    const uint half_unit = 1u << (unit - 1u);
    const bool above = rest > half_unit || (rest == half_unit && (more || (kept & 1u) != 0u));

    return above ? kept + 1u : kept;
}

/* Bits of binary32 to bits of fp16. |x| is at most 65504. */
uint to_half(uint bits)
{
    const uint sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    const uint exponent = magnitude >> 23, mantissa = (magnitude & 0x7fffffu) | 0x800000u;

    if (magnitude < 0x33000001u) /* 2^-25 and less round to 0 */
        return sign;
    const uint cut = exponent < 113u ? 126u - exponent : 13u; /* below 2^-14 fp16 is subnormal */
    const uint base = exponent < 113u ? 0u : exponent - 113u << 10;
    const uint kept = mantissa >> cut, rest = mantissa & (1u << cut) - 1u;

    return sign | base + round_to_even(kept, rest, cut, false);
}

float from_half(uint h)
{
    const uint exponent = h >> 10 & 31u, mantissa = h & 1023u;
    const float magnitude = exponent == 0u
                                ? float(mantissa) * 5.9604644775390625e-8 /* 2^-24 */
                                : uintBitsToFloat(exponent + 112u << 23 | mantissa << 13);

    return (h & 0x8000u) != 0u ? -magnitude : magnitude;
}

/* Bits of x / 15, where x is 0 or more. Below 2^-24 it returns 0, which is the fp16 number that the
 * quotient becomes. */
uint divide_by_15(uint bits)
{
    const uint exponent = bits >> 23, mantissa = (bits & 0x7fffffu) | 0x800000u;

    if (exponent < 103u)
        return 0u;
    const uint quotient = (mantissa << 8) / 15u, left = (mantissa << 8) % 15u;
    const uint cut = quotient < 1u << 28 ? 4u : 5u;
    const uint kept =
        round_to_even(quotient >> cut, quotient & (1u << cut) - 1u, cut, left != 0u);

    return (exponent + cut - 9u << 23) + kept; /* the leading bit of kept adds 1 to the exponent */
}

/* 1 / s as binary32, where s is a finite fp16 number above 0. */
float reciprocal(uint h)
{
    uint exponent = h >> 10, mantissa = h & 1023u;

    if (exponent == 0u) {
        const uint shift = 10u - uint(findMSB(mantissa));
        mantissa <<= shift;
        exponent = 25u - shift; /* from here on the exponent is larger by 24 than fp16's */
    } else {
        mantissa |= 1024u;
        exponent += 24u;
    }
    /* s = mantissa x 2^(exponent - 49). 2^36 / mantissa, in two steps of 32 bits: */
    const uint high = 0x80000000u / mantissa, rest = 0x80000000u % mantissa;
    const uint quotient = (high << 5) + (rest << 5) / mantissa, left = (rest << 5) % mantissa;
    const uint kept = round_to_even(quotient >> 2, quotient & 3u, 2u, left != 0u);

    return uintBitsToFloat((164u - exponent << 23) + kept);
}
