// A tile of an output whose packed form is transposed: written to shared memory along one axis,
// stored to the output along the other in 16-byte words.
#pragma once

#include "blocks.cuh"

namespace ts::quant {

// kRows x kColumns outputs, row-major. Words of a row are exchanged by a pattern of the row, so
// that neither the threads that fill a tile (eight rows of every fourth, or every 32nd) nor those
// that empty it meet in a bank.
template <typename T, int kRows, int kColumns>
struct Tile {
  static constexpr int kPerWord = 16 / sizeof(T), kWords = kColumns / kPerWord;
  uint4 words[kRows * kWords];

  __device__ static __forceinline__ int place(int row, int word) {
    return row * kWords + (word ^ (((row >> 2) + (row >> 5)) & 7));
  }
  __device__ __forceinline__ void put(int row, int column, float v) {
    reinterpret_cast<T*>(words + place(row, column / kPerWord))[column % kPerWord] = narrow<T>(v);
  }
  // Eight values from a column that is a multiple of eight on.
  __device__ __forceinline__ void put8(int row, int column, const float* v) {
#pragma unroll
    for (int i = 0; i < 8; i += kPerWord)
      words[place(row, (column + i) / kPerWord)] = Word<T>::make(v + i);
  }
  // Stores the part that exists: `rows` x `columns` of it, to an output of `stride` a row.
  __device__ __forceinline__ void store(T* out, int64_t stride, int rows, int columns, bool wide) {
    for (int i = threadIdx.x; i < rows * kWords; i += blockDim.x) {
      const int row = i / kWords, word = i % kWords, column = word * kPerWord;
      if (column >= columns) continue;
      const uint4 value = words[place(row, word)];
      T* target = out + row * stride + column;
      if (wide && column + kPerWord <= columns) {
        store16(target, value);
      } else {
        const T* v = reinterpret_cast<const T*>(&value);
#pragma unroll
        for (int k = 0; k < kPerWord; ++k)  // counted: the word stays in registers
          if (column + k < columns) target[k] = v[k];
      }
    }
  }
};

}  // namespace ts::quant
