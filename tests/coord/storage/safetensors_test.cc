#include "holdfast/coord/storage/safetensors.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "coord/temp_dir.h"

namespace holdfast {
namespace {

std::string length_of(std::uint64_t n) { return std::string(reinterpret_cast<const char*>(&n), sizeof n); }
std::string file_of(const std::string& header) { return length_of(header.size()) + header; }

// With `data_bytes` of tensors behind the header.
Status parse(const std::string& header, std::uint64_t data_bytes, SafetensorsHeader* out) {
  const std::string start = file_of(header);
  return parse_safetensors_header(start, start.size() + data_bytes, out);
}

void expect_refused(const std::string& header, std::uint64_t data_bytes, const std::string& why) {
  SafetensorsHeader out;
  out.tensors.resize(3);
  const Status status = parse(header, data_bytes, &out);
  EXPECT_EQ(status.code(), StatusCode::kInternal) << header;
  EXPECT_NE(status.message().find(why), std::string::npos) << header << ": " << status.message();
  EXPECT_TRUE(out.tensors.empty() && out.metadata.empty() && out.bytes == 0) << "a part of what was refused";
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}";
}

TEST(Safetensors, AHeaderIsWrittenByteForByteAsTheFormatSays) {
  std::vector<SafetensorsEntry> tensors(3);
  tensors[0] = {"b", "F32", {2, 3}, 0, 0};
  tensors[1] = {"a \"\xc3\xa9\"\n", "BF16", {}, 0, 0};
  tensors[2] = {"empty", "I64", {0, 7}, 0, 0};
  std::string out;
  ASSERT_TRUE(write_safetensors_header(&tensors, {{"format", "pt"}, {"a", ""}}, &out).ok());
  const std::string expected =
      "{\"__metadata__\":{\"a\":\"\",\"format\":\"pt\"},"
      "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
      "\"a \\\"\xc3\xa9\\\"\\n\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[24,26]},"
      "\"empty\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[26,26]}}";
  const std::size_t padded = (expected.size() + 7) / 8 * 8;
  EXPECT_EQ(out, length_of(padded) + expected + std::string(padded - expected.size(), ' '));
  EXPECT_EQ(tensors[1].begin, 24u);
  EXPECT_EQ(tensors[1].end, 26u);
}

TEST(Safetensors, WithoutTensorsTheHeaderIsAnEmptyObject) {
  std::vector<SafetensorsEntry> none;
  std::string out;
  ASSERT_TRUE(write_safetensors_header(&none, {}, &out).ok());
  EXPECT_EQ(out, file_of("{}      "));
  SafetensorsHeader header;
  ASSERT_TRUE(parse_safetensors_header(out, out.size(), &header).ok());
  EXPECT_EQ(header.bytes, 16u);
}

TEST(Safetensors, ReadsWhatAnotherWriterWroteInItsOwnOrder) {
  SafetensorsHeader header;
  // Fields and tensors in another order than ours, spaces in between and none at the end.
  ASSERT_TRUE(parse("{ \"late\":{\"data_offsets\":[4,12],\"dtype\":\"F64\",\"shape\":[1]},\t\n" +
                        tensor("nothing", "U8", "[0]", "[4,4]") + "," +
                        tensor("early", "F32", "[]", "[0,4]") +
                        ",\"__metadata__\":{\"format\":\"pt\",\"\\u0041\":\"\\u0000\"}}",
                    12, &header)
                  .ok());
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.tensors[0].name, "early");
  EXPECT_EQ(header.tensors[0].shape, std::vector<std::uint64_t>{});
  EXPECT_EQ(header.tensors[1].name, "nothing");
  EXPECT_EQ(header.tensors[2].name, "late");
  EXPECT_EQ(header.tensors[2].dtype, "F64");
  EXPECT_EQ(header.tensors[2].begin, 4u);
  EXPECT_EQ(header.tensors[2].end, 12u);
  EXPECT_EQ(header.metadata,
            (std::map<std::string, std::string>{{"A", std::string(1, '\0')}, {"format", "pt"}}));
}

TEST(Safetensors, EveryDtypeHasItsSize) {
  const std::vector<std::pair<std::string, std::uint64_t>> sizes = {
      {"F64", 8},     {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
      {"F8_E8M0", 1}, {"C64", 8}, {"I64", 8}, {"I32", 4},  {"I16", 2},     {"I8", 1},
      {"U64", 8},     {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}};
  for (const auto& [dtype, size] : sizes) {
    EXPECT_EQ(safetensors_dtype_size(dtype), size) << dtype;
    SafetensorsHeader header;
    EXPECT_TRUE(parse("{" + tensor("a", dtype, "[3]", "[0," + std::to_string(3 * size) + "]") + "}", 3 * size,
                      &header)
                    .ok())
        << dtype;
  }
  for (const char* dtype : {"", "f32", "F4", "F128", "C128", "F32 ", "float32"})
    EXPECT_EQ(safetensors_dtype_size(dtype), 0u);
}

TEST(Safetensors, NamesMayHoldControlCharacters) {
  SafetensorsHeader header;
  ASSERT_TRUE(parse("{" + tensor("\\u001b[2J\\u0000", "U8", "[1]", "[0,1]") + "}", 1, &header).ok());
  EXPECT_EQ(header.tensors[0].name, std::string("\x1b[2J\0", 5));
}

TEST(Safetensors, ALengthThatCannotBeIsRefusedBeforeAnythingIsAllocated) {
  SafetensorsHeader out;
  const std::string fifty = length_of(~std::uint64_t{0}) + std::string(42, '{');
  EXPECT_NE(parse_safetensors_header(fifty, fifty.size(), &out).message().find("100 MB"), std::string::npos);
  for (const std::uint64_t length : {std::uint64_t{43}, std::uint64_t{100'000'000}}) {
    const std::string start = length_of(length) + std::string(42, '{');
    EXPECT_NE(parse_safetensors_header(start, start.size(), &out).message().find("longer than the file"),
              std::string::npos);
  }
  // A file that is really large, of which only the beginning was read.
  const std::string start = length_of(100'000'001) + "{}";
  EXPECT_NE(parse_safetensors_header(start, 1ull << 40, &out).message().find("100 MB"), std::string::npos);
  const std::string cut = length_of(100) + "{}";
  EXPECT_NE(parse_safetensors_header(cut, 1000, &out).message().find("not all there"), std::string::npos);
  for (std::size_t n = 0; n < 8; ++n)
    EXPECT_FALSE(parse_safetensors_header(fifty.substr(0, n), n, &out).ok());
}

TEST(Safetensors, WhatIsNoObjectOfOneTextIsRefused) {
  for (const std::string header :
       {"", "        ", "[]", "null", "\"{}\"", " {}", "\xef\xbb\xbf{}", "{}\n", "{}x", "{"}) {
    expect_refused(header, 0, "{...}");
  }
  expect_refused(std::string("{}\0}", 4), 0, "NUL");
  expect_refused(std::string("{\0}", 3), 0, "NUL");
  expect_refused("{}}", 0, "JSON");
  expect_refused("{}{}", 0, "JSON");
  expect_refused("{/**/}", 0, "JSON");
  expect_refused("{,}", 0, "JSON");
  expect_refused("{" + tensor("a", "U8", "[1]", "[0,1]") + ",}", 1, "JSON");
  expect_refused("{" + tensor("\xff", "U8", "[1]", "[0,1]") + "}", 1, "UTF-8");
  expect_refused("{" + tensor("\xed\xa0\x80", "U8", "[1]", "[0,1]") + "}", 1, "UTF-8");
  expect_refused("{" + tensor("\\ud800", "U8", "[1]", "[0,1]") + "}", 1, "UTF-8");
  expect_refused("{" + tensor("\n", "U8", "[1]", "[0,1]") + "}", 1, "JSON");
}

TEST(Safetensors, DepthThatTheFormatDoesNotHaveIsRefused) {
  for (const int depth : {1, 100'000}) {
    const auto bomb = [&](const std::string& open, const std::string& close) {
      std::string text;
      for (int i = 0; i < depth; ++i) text += open;
      for (int i = 0; i < depth; ++i) text += close;
      return text;
    };
    expect_refused("{" + tensor("a", "U8", "[" + bomb("[", "]") + "]", "[0,1]") + "}", 1, "another kind");
    expect_refused("{\"a\":" + bomb("[", "]") + "}", 1, "another kind");
    expect_refused("{\"a\":{\"dtype\":" + bomb("{\"x\":", "}") + "}}", 1, "");
    expect_refused("{\"__metadata__\":{\"a\":" + bomb("[", "]") + "}}", 0, "another kind");
  }
}

TEST(Safetensors, NamesThatAreThereTwiceAreRefused) {
  const std::string a = tensor("a", "U8", "[1]", "[0,1]");
  expect_refused("{" + a + "," + a + "}", 1, "\"a\" twice");
  expect_refused("{" + a + "," + tensor("\\u0061", "U8", "[1]", "[1,2]") + "}", 2, "\"a\" twice");
  expect_refused("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
                 "field \"dtype\" twice");
  expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
                 "field \"shape\" twice");
  expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"data_offsets\":[0,1]}}", 1,
                 "twice");
  expect_refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "\"__metadata__\" twice");
  expect_refused("{\"__metadata__\":{\"k\":\"1\",\"k\":\"1\"}}", 0, "\"k\" twice");
}

TEST(Safetensors, FieldsThatAreMissingUnknownOrOfAnotherTypeAreRefused) {
  expect_refused("{\"a\":{}}", 0, "lacks");
  expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[0]}}", 0, "lacks");
  expect_refused("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,0]}}", 0, "lacks");
  expect_refused("{\"a\":{\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "lacks");
  expect_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"x\":1}}", 0,
                 "unknown field \"x\"");
  for (const char* other : {"1", "null", "true", "[]", "{}", "1.5", "-1"}) {
    expect_refused("{\"a\":{\"dtype\":" + std::string(other) + ",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
                   "tensor \"a\"");
    if (std::string(other) != "{}") expect_refused("{\"a\":" + std::string(other) + "}", 0, "");
    expect_refused("{\"__metadata__\":{\"k\":" + std::string(other) + "}}", 0, "");
  }
  for (const char* other : {"1", "null", "true", "\"0\"", "{}"}) {
    expect_refused("{" + tensor("a", "U8", other, "[0,0]") + "}", 0, "another kind");
    expect_refused("{" + tensor("a", "U8", "[0]", other) + "}", 0, "another kind");
  }
  expect_refused("{\"__metadata__\":\"x\"}", 0, "another kind");
  expect_refused("{\"__metadata__\":[]}", 0, "another kind");
}

TEST(Safetensors, SizesThatAreNoWholeNumbersAreRefused) {
  for (const char* number : {"-1", "-0", "1.0", "1e0", "18446744073709551616", "true", "null", "\"1\""}) {
    expect_refused("{" + tensor("a", "U8", "[" + std::string(number) + "]", "[0,1]") + "}", 1,
                   "tensor \"a\"");
    expect_refused("{" + tensor("a", "U8", "[1]", "[0," + std::string(number) + "]") + "}", 1,
                   "tensor \"a\"");
    expect_refused("{" + tensor("a", "U8", "[1]", "[" + std::string(number) + ",1]") + "}", 1,
                   "tensor \"a\"");
  }
  for (const char* number : {"01", "1e400", "+1", "0x1", "NaN", "Infinity", ".1"}) {
    expect_refused("{" + tensor("a", "U8", "[" + std::string(number) + "]", "[0,1]") + "}", 1, "JSON");
  }
}

TEST(Safetensors, SizesThatOverflowAreRefused) {
  expect_refused("{" + tensor("a", "U8", "[18446744073709551615,2]", "[0,1]") + "}", 1, "overflows");
  expect_refused("{" + tensor("a", "F64", "[2305843009213693952]", "[0,0]") + "}", 0, "overflows");
  expect_refused("{" + tensor("a", "U8", "[4294967296,4294967296]", "[0,0]") + "}", 0, "overflows");
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  expect_refused("{" + tensor("a", "U8", ones + "]", "[0,1]") + "}", 1, "64 dimensions");
}

TEST(Safetensors, OffsetsThatAreNotTwoOrNotAsFarApartAsTheTensorAreRefused) {
  expect_refused("{" + tensor("a", "U8", "[1]", "[]") + "}", 1, "two offsets");
  expect_refused("{" + tensor("a", "U8", "[1]", "[0]") + "}", 1, "two offsets");
  expect_refused("{" + tensor("a", "U8", "[1]", "[0,1,1]") + "}", 1, "two offsets");
  expect_refused("{" + tensor("a", "U8", "[2]", "[0,1]") + "}", 1, "another size");
  expect_refused("{" + tensor("a", "F32", "[]", "[0,1]") + "}", 1, "another size");
  expect_refused("{" + tensor("a", "U8", "[0]", "[0,1]") + "}", 1, "another size");
  expect_refused("{" + tensor("a", "U8", "[1]", "[1,0]") + "}", 1, "ends before");
  expect_refused(
      "{" + tensor("a", "U8", "[18446744073709551615]", "[18446744073709551615,18446744073709551614]") + "}",
      1, "ends before");
  expect_refused("{" + tensor("a", "X8", "[1]", "[0,1]") + "}", 1, "unknown dtype");
}

TEST(Safetensors, GapsOverlapsAndBytesOfNoTensorAreRefused) {
  const std::string a = tensor("a", "U8", "[2]", "[0,2]");
  expect_refused("{" + tensor("a", "U8", "[1]", "[1,2]") + "}", 2, "gap");
  expect_refused("{" + a + "," + tensor("b", "U8", "[1]", "[3,4]") + "}", 4, "gap");
  expect_refused("{" + a + "," + tensor("b", "U8", "[2]", "[1,3]") + "}", 3, "overlaps");
  expect_refused("{" + a + "," + tensor("b", "U8", "[2]", "[0,2]") + "}", 2, "overlaps");
  expect_refused("{" + a + "," + tensor("b", "U8", "[0]", "[1,1]") + "}", 2, "overlaps");
  expect_refused("{" + a + "}", 1, "there are 1");
  expect_refused("{" + a + "}", 3, "there are 3");
  expect_refused("{}", 1, "there are 1");
}

TEST(Safetensors, AMessageShowsTheBeginningOfALongName) {
  const std::string name(1 << 20, 'x');
  SafetensorsHeader out;
  const Status status = parse("{" + tensor(name, "U8", "[1]", "[1,2]") + "}", 2, &out);
  EXPECT_LT(status.message().size(), 400u);
}

TEST(Safetensors, WhatTheFormatCannotHoldIsNotWritten) {
  std::string out = "as it was";
  const auto written = [&](std::vector<SafetensorsEntry> tensors,
                           const std::map<std::string, std::string>& metadata) {
    return write_safetensors_header(&tensors, metadata, &out);
  };
  EXPECT_FALSE(written({{"a", "U8", {1}, 0, 0}, {"a", "U8", {1}, 0, 0}}, {}).ok());
  EXPECT_FALSE(written({{"__metadata__", "U8", {1}, 0, 0}}, {}).ok());
  EXPECT_FALSE(written({{"\xff", "U8", {1}, 0, 0}}, {}).ok());
  EXPECT_FALSE(written({}, {{"k", "\xff"}}).ok());
  EXPECT_FALSE(written({{"a", "X8", {1}, 0, 0}}, {}).ok());
  EXPECT_FALSE(written({{"a", "F64", {1ull << 61}, 0, 0}}, {}).ok());
  EXPECT_FALSE(written({{"a", "U8", {~0ull}, 0, 0}, {"b", "U8", {1}, 0, 0}}, {}).ok());
  EXPECT_FALSE(written({{"a", "U8", std::vector<std::uint64_t>(65, 1), 0, 0}}, {}).ok());
  EXPECT_EQ(out, "as it was");
}

// The file of the format's own README, made by hand: one tensor of two by two bytes.
TEST(Safetensors, ReadsAFileByHandAndGivesItsHeaderForADigest) {
  const std::string header = R"({"weight":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}})";
  const TempDir temp;
  write_file(temp / "a", file_of(header) + "\x01\x02\x03\x04");
  std::unique_ptr<ReadableFile> file;
  ASSERT_TRUE(real_file_system().open_file(temp / "a", &file).ok());
  SafetensorsHeader out;
  std::string raw;
  ASSERT_TRUE(read_safetensors_header(*file, &out, &raw).ok());
  EXPECT_EQ(raw, file_of(header));
  EXPECT_EQ(out.bytes, raw.size());
  ASSERT_EQ(out.tensors.size(), 1u);
  EXPECT_EQ(out.tensors[0].shape, (std::vector<std::uint64_t>{2, 2}));
}

TEST(Safetensors, AFileThatIsCutAnywhereIsRefused) {
  const std::string whole =
      file_of("{" + tensor("a", "F32", "[2]", "[0,8]") + "," + tensor("b", "U8", "[3]", "[8,11]") + "}") +
      "12345678abc";
  const TempDir temp;
  for (std::size_t n = 0; n <= whole.size(); ++n) {
    write_file(temp / "a", whole.substr(0, n));
    std::unique_ptr<ReadableFile> file;
    ASSERT_TRUE(real_file_system().open_file(temp / "a", &file).ok());
    SafetensorsHeader out;
    EXPECT_EQ(read_safetensors_header(*file, &out).ok(), n == whole.size()) << n;
  }
}

}  // namespace
}  // namespace holdfast
