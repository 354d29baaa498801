#include "frontdoor/images.h"

#include <elf.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <random>

#include "fixtures.h"
#include "frontdoor/cubin.h"
#include "frontdoor/ptx_scan.h"

namespace gpupool::frontdoor {
namespace {

const std::string kPtx75 = ".version 7.0\n.target sm_75\n.address_size 64\n";
const std::string kPtx90a = "// a comment\n.version 8.0\n.target sm_90a\n.address_size 64\n";

CUresult pick(const Blob& fatbin, int major, int minor, Candidate* chosen, bool cubin = true,
              bool ptx = true) {
  Image image;
  CUresult error = open_bounded(fatbin, &image);
  if (error != CUDA_SUCCESS) return error;
  const Candidate* best = nullptr;
  error = select(image.parts.at(0), {major, minor, cubin, ptx}, &best);
  if (best != nullptr) *chosen = *best;
  return error;
}

TEST(Classify, TellsFormatsApart) {
  EXPECT_EQ(classify(FatbinBuilder().build()), ImageKind::kFatbin);
  EXPECT_EQ(classify(sample("sample_sm86.cubin")), ImageKind::kElf);
  EXPECT_EQ(classify(sample("sample.ptx")), ImageKind::kPtx);
  EXPECT_EQ(classify(bytes_of("\x7fTileIR....")), ImageKind::kTileIr);
  EXPECT_EQ(classify(bytes_of("  \n// x")), ImageKind::kPtx);
  EXPECT_EQ(classify(bytes_of("")), ImageKind::kUnknown);
  EXPECT_EQ(classify(bytes_of("hello")), ImageKind::kUnknown);
}

TEST(Select, PrefersTheNearestCubin) {
  const Blob cubin = sample("sample_sm86.cubin");
  const Blob fatbin = FatbinBuilder()
                          .add(2, 75, cubin, Packing::kPlain)
                          .add(2, 80, cubin, Packing::kPlain, 72)
                          .add(2, 86, cubin, Packing::kZstd, 120)
                          .add(1, 75, bytes_of(kPtx75), Packing::kZstd)
                          .build();
  Candidate chosen;
  ASSERT_EQ(pick(fatbin, 8, 9, &chosen), CUDA_SUCCESS);
  EXPECT_EQ(chosen.architecture, 86);
  ASSERT_EQ(pick(fatbin, 8, 0, &chosen), CUDA_SUCCESS);
  EXPECT_EQ(chosen.architecture, 80);
  ASSERT_EQ(pick(fatbin, 9, 0, &chosen), CUDA_SUCCESS);  // another major version: only PTX
  EXPECT_EQ(chosen.kind, CodeKind::kPtx);
  EXPECT_EQ(pick(fatbin, 7, 0, &chosen), CUDA_ERROR_NO_BINARY_FOR_GPU);
  ASSERT_EQ(pick(fatbin, 8, 6, &chosen, false), CUDA_SUCCESS);  // a device that runs no cubin
  EXPECT_EQ(chosen.kind, CodeKind::kPtx);
}

TEST(Select, TakesTheNewestPtxThatTheDeviceCanRun) {
  const Blob fatbin = FatbinBuilder()
                          .add(1, 75, bytes_of(kPtx75), Packing::kPlain)
                          .add(1, 90, bytes_of(kPtx90a), Packing::kLz4)
                          .build();
  Candidate chosen;
  ASSERT_EQ(pick(fatbin, 9, 0, &chosen), CUDA_SUCCESS);
  EXPECT_EQ(chosen.architecture, 90);
  ASSERT_EQ(pick(fatbin, 10, 0, &chosen), CUDA_SUCCESS);  // sm_90a runs on 9.0 only
  EXPECT_EQ(chosen.architecture, 75);
}

TEST(Extract, DecompressesWhatWasCompressed) {
  const Blob text = bytes_of(kPtx75 + std::string(100000, ' '));
  for (Packing packing : {Packing::kPlain, Packing::kLz4, Packing::kZstd}) {
    Candidate chosen;
    const Blob fatbin = FatbinBuilder().add(1, 75, text, packing).build();
    ASSERT_EQ(pick(fatbin, 8, 0, &chosen), CUDA_SUCCESS);
    Blob code;
    ASSERT_EQ(extract(chosen, kMaxRawBytes, &code), CUDA_SUCCESS);
    EXPECT_EQ(code, text);
    EXPECT_EQ(extract(chosen, text.size() - 1, &code), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_TRUE(code.empty());
  }
}

TEST(Extract, RefusesAFalseSize) {
  Blob fatbin = FatbinBuilder().add(1, 75, bytes_of(kPtx75), Packing::kZstd).build();
  uint64_t lie = uint64_t{200} << 20;
  memcpy(&fatbin[16 + 56], &lie, sizeof lie);  // the uncompressed size
  Candidate chosen;
  ASSERT_EQ(pick(fatbin, 8, 0, &chosen), CUDA_SUCCESS);
  Blob code;
  EXPECT_EQ(extract(chosen, kMaxRawBytes, &code), CUDA_ERROR_INVALID_IMAGE);
}

TEST(OpenTrusted, FollowsBothWrapperVersions) {
  struct {
    uint32_t magic = 0x466243B1, version = 1;
    const void* fatbin = nullptr;
    const void* const* parts = nullptr;
  } wrapper;
  const Blob first = FatbinBuilder().add(1, 75, bytes_of(kPtx75), Packing::kZstd).build();
  const Blob second =
      FatbinBuilder().add(2, 86, sample("sample_sm86.cubin"), Packing::kPlain).build();
  wrapper.fatbin = first.data();
  Image image;
  ASSERT_EQ(open_trusted(&wrapper, &image), CUDA_SUCCESS);
  ASSERT_EQ(image.parts.size(), 1u);
  const void* parts[] = {first.data(), second.data(), nullptr};
  wrapper.version = 2;
  wrapper.parts = parts;
  ASSERT_EQ(open_trusted(&wrapper, &image), CUDA_SUCCESS);
  ASSERT_EQ(image.parts.size(), 2u);
  EXPECT_EQ(image.parts[1][0].architecture, 86);
  wrapper.version = 3;
  EXPECT_EQ(open_trusted(&wrapper, &image), CUDA_ERROR_INVALID_IMAGE);
}

TEST(OpenTrusted, FindsTheLengthOfTextAndCubins) {
  Image image;
  const std::string text = kPtx75;
  ASSERT_EQ(open_trusted(text.c_str(), &image), CUDA_SUCCESS);
  EXPECT_EQ(image.parts[0][0].stored.size(), text.size());
  const Blob cubin = sample("sample_sm86.cubin");
  ASSERT_EQ(open_trusted(cubin.data(), &image), CUDA_SUCCESS);
  EXPECT_EQ(image.parts[0][0].stored.size(), cubin.size());
  EXPECT_EQ(image.parts[0][0].architecture, 86);
  EXPECT_EQ(open_trusted("", &image), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(open_trusted(nullptr, &image), CUDA_ERROR_INVALID_VALUE);
}

// Memory that ends with what is put into it.
class Edge {
 public:
  Edge() {
    void* at = mmap(nullptr, 2 * kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    begin_ = static_cast<uint8_t*>(at);
    EXPECT_EQ(mprotect(begin_, kBytes, PROT_READ | PROT_WRITE), 0);
  }
  ~Edge() { munmap(begin_, 2 * kBytes); }
  const void* put(const Blob& data) {
    std::copy(data.begin(), data.end(), begin_ + kBytes - data.size());
    return begin_ + kBytes - data.size();
  }

 private:
  static constexpr size_t kBytes = 64 * 1024;
  uint8_t* begin_;
};

TEST(OpenTrusted, ReadsNothingThatIsNotThere) {
  Edge edge;
  Image image;
  const Blob whole = FatbinBuilder()
                         .add(1, 75, bytes_of(kPtx75), Packing::kPlain)
                         .add(1, 75, bytes_of(kPtx75), Packing::kZstd)
                         .build();
  // The last seven bytes may be padding.
  for (size_t bytes = 1; bytes + 7 < whole.size(); ++bytes) {
    const void* at = edge.put(Blob(whole.begin(), whole.begin() + static_cast<long>(bytes)));
    if (open_trusted(at, &image) != CUDA_SUCCESS) continue;
    // The headers were there; of the code that wasn't is told when it is wanted.
    Blob code;
    for (const Candidate& candidate : image.parts[0]) extract(candidate, kMaxRawBytes, &code);
    EXPECT_EQ(extract(image.parts[0].back(), kMaxRawBytes, &code), CUDA_ERROR_INVALID_IMAGE);
  }
  EXPECT_EQ(open_trusted(edge.put(whole), &image), CUDA_SUCCESS);
  const Blob cubin = sample("sample_sm86.cubin");
  for (size_t bytes = 4; bytes < cubin.size(); bytes += 5) {
    const void* at = edge.put(Blob(cubin.begin(), cubin.begin() + static_cast<long>(bytes)));
    Blob code;
    if (open_trusted(at, &image) != CUDA_SUCCESS) continue;
    EXPECT_EQ(extract(image.parts[0][0], kMaxRawBytes, &code), CUDA_ERROR_INVALID_IMAGE);
  }
  for (size_t bytes = 1; bytes < kPtx75.size(); ++bytes) {
    EXPECT_EQ(open_trusted(edge.put(bytes_of(kPtx75.substr(0, bytes))), &image),
              CUDA_ERROR_INVALID_IMAGE);
  }
  EXPECT_EQ(open_trusted(edge.put({}), &image), CUDA_ERROR_INVALID_VALUE);
}

// Thousands of tables that lie over one another would take for ever to look at.
TEST(Hostile, OverlappingTablesOfACubin) {
  constexpr size_t kSections = 60000, kTable = 4 << 20;
  Blob elf = sample("sample_sm86.cubin");
  Elf64_Ehdr header;
  memcpy(&header, elf.data(), sizeof header);
  const size_t symbols = elf.size();
  elf.resize(symbols + kTable + kSections * sizeof(Elf64_Shdr));
  std::vector<Elf64_Shdr> sections(kSections);
  for (Elf64_Shdr& section : sections) {
    section.sh_type = SHT_SYMTAB;
    section.sh_offset = symbols;
    section.sh_size = kTable;
    section.sh_entsize = sizeof(Elf64_Sym);
    section.sh_link = 1;
  }
  sections[0] = {};
  sections[1].sh_type = SHT_STRTAB;
  sections[1].sh_size = 1;
  header.e_shoff = symbols + kTable;
  header.e_shnum = kSections;
  header.e_shentsize = sizeof(Elf64_Shdr);
  header.e_shstrndx = 1;
  memcpy(elf.data(), &header, sizeof header);
  memcpy(&elf[header.e_shoff], sections.data(), kSections * sizeof(Elf64_Shdr));
  EXPECT_FALSE(elf_is_sound(elf));
  ProgramInfo info;
  EXPECT_FALSE(scan_cubin(elf, &info));
}

TEST(OpenBounded, RefusesAWrapper) {
  Blob wrapper(24);
  const uint32_t magic = 0x466243B1;
  memcpy(wrapper.data(), &magic, sizeof magic);
  Image image;
  EXPECT_EQ(open_bounded(wrapper, &image), CUDA_ERROR_INVALID_IMAGE);
}

// Whatever the bytes are: an answer, and (under AddressSanitizer) no access outside of them.
void read_everything(const Blob& blob) {
  // Exactly as large as the data, so that one byte too far is noticed.
  std::unique_ptr<uint8_t[]> exact(new uint8_t[blob.size()]);
  std::copy(blob.begin(), blob.end(), exact.get());
  const Bytes bytes(exact.get(), blob.size());
  Image image;
  if (open_bounded(bytes, &image) != CUDA_SUCCESS) return;
  for (const auto& part : image.parts) {
    const Candidate* best = nullptr;
    select(part, {8, 6, true, true}, &best);
    for (const Candidate& candidate : part) {
      Blob code;
      if (extract(candidate, 1 << 20, &code) != CUDA_SUCCESS) continue;
      ProgramInfo info;
      std::string why;
      if (candidate.kind == CodeKind::kPtx) {
        scan_ptx({reinterpret_cast<const char*>(code.data()), code.size()}, &info, &why);
      } else {
        scan_cubin(code, &info);
      }
    }
  }
}

TEST(Hostile, TruncatedAndCorruptedImages) {
  const Blob images[] = {
      sample("sample_sm86.cubin"),
      sample("sample.ptx"),
      FatbinBuilder()
          .add(2, 86, sample("sample_sm86.cubin"), Packing::kZstd)
          .add(1, 75, sample("sample.ptx"), Packing::kLz4)
          .add(1, 75, bytes_of(kPtx75), Packing::kPlain)
          .build(),
  };
  std::mt19937 random(1);
  for (const Blob& image : images) {
    for (size_t bytes = 0; bytes < image.size(); bytes += 1 + bytes / 64) {
      read_everything(Blob(image.begin(), image.begin() + bytes));
    }
    for (int round = 0; round < 3000; ++round) {
      Blob changed = image;
      for (int i = 0; i < 1 + round % 4; ++i) {
        // Headers lie at the beginning and, of an ELF file, at the end.
        const size_t span = round % 2 ? changed.size() : std::min<size_t>(changed.size(), 256);
        const size_t at = random() % span;
        changed[round % 3 ? at : changed.size() - 1 - at] =
            static_cast<uint8_t>(random() % 3 ? random() : 0xff);
      }
      read_everything(changed);
    }
  }
}

TEST(Hostile, AnEntryThatClaimsMoreThanThereIs) {
  Blob fatbin = FatbinBuilder().add(1, 75, bytes_of(kPtx75), Packing::kPlain).build();
  const uint64_t huge = UINT64_MAX - 8;
  memcpy(&fatbin[16 + 8], &huge, sizeof huge);
  Image image;
  EXPECT_EQ(open_bounded(fatbin, &image), CUDA_ERROR_INVALID_IMAGE);
}

TEST(Select, UnpacksNoMoreThanTheBeginning) {
  // Text that hardly shrinks, so that its end is far from its beginning when it is packed too.
  std::string text = ".version 8.0\n.target sm_90a\n.address_size 64\n// ";
  std::minstd_rand random(1);
  for (int i = 0; i < 1 << 20; ++i) text.push_back(static_cast<char>('!' + random() % 90));
  for (const Packing packing : {Packing::kZstd, Packing::kLz4}) {
    Blob blob = FatbinBuilder().add(1, 90, bytes_of(text), packing).build();
    for (size_t i = blob.size() - 4096; i < blob.size(); ++i) blob[i] = 0xff;
    Image image;
    ASSERT_EQ(open_bounded(blob, &image), CUDA_SUCCESS);
    const Candidate* best = nullptr;
    std::vector<uint8_t> code;
    if (packing == Packing::kZstd) {
      EXPECT_NE(extract(image.parts[0][0], kMaxRawBytes, &code), CUDA_SUCCESS) << "a broken end";
    }
    EXPECT_EQ(select(image.parts[0], {10, 0, true, true}, &best), CUDA_ERROR_NO_BINARY_FOR_GPU)
        << "known to be for sm_90a alone";
    EXPECT_EQ(select(image.parts[0], {9, 0, true, true}, &best), CUDA_SUCCESS);
  }
}

}  // namespace
}  // namespace gpupool::frontdoor
