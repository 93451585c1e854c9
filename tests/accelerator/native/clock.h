// Vector clocks: which tasks of which streams are known to come before a point.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace fake {

class Clock {
 public:
  // Number of the last task of `stream` that comes before; 0 for none.
  uint64_t of(int stream) const { return stream < (int)last_.size() ? last_[stream] : 0; }

  void advance(int stream, uint64_t number) {
    if ((int)last_.size() <= stream) last_.resize(stream + 1);
    last_[stream] = std::max(last_[stream], number);
  }

  void join(const Clock& other) {
    for (size_t i = 0; i < other.last_.size(); i++) advance((int)i, other.last_[i]);
  }

 private:
  std::vector<uint64_t> last_;
};

}  // namespace fake
