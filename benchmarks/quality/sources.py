"""Where the public tables come from: repositories at fixed commits, and the SHA-256 of every file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Files of a public repository on GitHub.

    Args:
        repository: owner and name.
        commit: that the files are of.
        files: by path in the repository, the SHA-256 of the contents.
        terms: what the data's or the code's owner asks for.
    """

    repository: str
    commit: str
    files: dict[str, str]
    terms: str

    def url(self, path: str) -> str:
        """Public address of a file."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{path}"


_ASSISTMENTS = "data/assist2009_updated/assist2009_updated_"
_OFFICE = "Office_Products_5_2016-10-2018-11.csv"

#: By name of the table. `fuxictr` is code: the three models that the package on PyPI lacks.
SOURCES = {
    "ml-latest-small": Source(
        "Muellersen/Recommender-Systems",
        "928dcbd0c8047827d60f2ae4d1a2e2741d4132d0",
        {
            "ml-latest-small/ratings.csv": "62999d40ca377ca245df5d92f743d49e6193e5480f0a143a47f166f772f910ce",
            "ml-latest-small/movies.csv": "8db38b17409bd5aba53ed4e3df598df5666746e35d0707bc75eec8761744fcf0",
        },
        "GroupLens: research use, acknowledge them, no redistribution without permission",
    ),
    "assistments2009": Source(
        "jennyzhang0215/DKVMN",
        "96c2834ae6968fbfb761b5ba96be26b054c7c1c3",
        {
            f"{_ASSISTMENTS}train1.csv": "3816a773851dd0a727322cf9396fd14a652c3a3ff07e71a56ae2ea43f4164201",
            f"{_ASSISTMENTS}valid1.csv": "e4fff52e91a4b140207de7590e7bc131efa595f42fdfb3983729bc3faa5b5262",
            f"{_ASSISTMENTS}train2.csv": "9bc46dccd674657d730f22869da3ce7667a57c34e1c511067d6bc7f4c865bea9",
            f"{_ASSISTMENTS}valid2.csv": "f9abe32803603d8bd1f7df7275d7327462f205ee0ff29ae558a35e69e246f3dc",
            f"{_ASSISTMENTS}train3.csv": "78d66030acf16a75031d93be77e247370d6d764bc40794f8d0a40a762568aa0b",
            f"{_ASSISTMENTS}valid3.csv": "275e96b63290dd9c47ca224ec7c089385041fbec8a66918631729907025da323",
            f"{_ASSISTMENTS}train4.csv": "37b7c55f68965aac0a8e9434fc39cca137d376a18c5839ce6b368612dbabccad",
            f"{_ASSISTMENTS}valid4.csv": "4b3c59ca825eb0ebac2039efaec1722e2c93b6c4a5cab1bc3554cffec597369f",
            f"{_ASSISTMENTS}train5.csv": "7c5c1e8f82ecd5b90522d4a544f81810bd0b5629a9f0fb75848a219c09d78d33",
            f"{_ASSISTMENTS}valid5.csv": "14923acd4ca909d0359dbecdf4322adbe49c645453ba1405eed864a454baa001",
            f"{_ASSISTMENTS}test.csv": "2e8f1d7600543aededa31323343f7d762b8f51c53c0caca852e813b67fe4e823",
        },
        "ASSISTments: cite Feng, Heffernan and Koedinger (2009)",
    ),
    "amazon_office": Source(
        "AkaliKong/MiniOneRec",
        "81b4ba9811cfb152cf161f1c486fe516510d081e",
        {
            "data/Amazon/index/Office_Products.item.json": (
                "398cb2bb7868bedf2ed8ed6b24d25e172f21b7022554d1f8ea52200478494c1c"
            ),
            "data/Amazon/index/Office_Products.index.json": (
                "f599d2b858beb5a2f660d6253896746c25a65f3a7d0c2f3ae6fd4ec2091eebc8"
            ),
            f"data/Amazon/valid/{_OFFICE}": "a7d8f049ae425f413def22687cebcd172c65833633ff76dd3d90a83bca98234f",
            f"data/Amazon/test/{_OFFICE}": "c1967034e197a7837a8962f2556efaabc12eb5bb84e1fdc79cd0accbce71add5",
        },
        "Amazon reviews (McAuley et al.): research use",
    ),
    "fuxictr": Source(
        "reczoo/FuxiCTR",
        "0245987fdc1d43c36164ea496a02324885a8557a",
        {
            "model_zoo/BST/src/BST.py": "d8c6a83e3887ff200c0037312360787e797c2f9e524ed72feb863f9480fd9dc3",
            "model_zoo/DMIN/src/DMIN.py": "2e8bd88365259588046b8e651611b34d857f9fc3c18ebd1bfd759b89fb0b0c11",
            "model_zoo/DMR/src/DMR.py": "4b192ed85ea4699477dfca8c5ef7b5cd7fcb1a49af670018a4200b4d522b6e8d",
        },
        "Apache License 2.0",
    ),
}
