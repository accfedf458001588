"""What is measured in the PhysioNet/CinC Challenge 2012: normal values and possible ones, as public constants.

Normal values are the middle of an adult's reference interval at rest, as textbooks of laboratory medicine give it;
intervals of possible values are so wide that only slips lie outside (a pH of 735, a height of 1.8 cm, -1 for unknown).
"""

from typing import NamedTuple


class Parameter(NamedTuple):
    """A parameter in the challenge's unit.

    Attributes:
        normal: what stands for a missing value.
        low, high: the interval of possible values; another one counts as missing.
    """

    normal: float
    low: float
    high: float


DESCRIPTORS = {
    "Age": Parameter(65, 15, 120),  # years
    "Gender": Parameter(0.5, 0, 1),  # 0 female, 1 male
    "Height": Parameter(170, 100, 230),  # cm
    "ICUType": Parameter(0, 1, 4),
}
ICU_TYPES = {1: "coronary", 2: "cardiac surgery", 3: "medical", 4: "surgical"}

SERIES = {
    "Albumin": Parameter(4.2, 0.5, 7),  # g/dL
    "ALP": Parameter(80, 1, 5000),  # IU/L
    "ALT": Parameter(25, 1, 20000),  # IU/L
    "AST": Parameter(25, 1, 30000),  # IU/L
    "Bilirubin": Parameter(0.7, 0, 80),  # mg/dL
    "BUN": Parameter(14, 0, 300),  # mg/dL
    "Cholesterol": Parameter(180, 20, 1000),  # mg/dL
    "Creatinine": Parameter(0.9, 0, 30),  # mg/dL
    "DiasABP": Parameter(75, 10, 200),  # mmHg, invasive
    "FiO2": Parameter(0.21, 0.21, 1),  # share of oxygen; room air
    "GCS": Parameter(15, 3, 15),  # Glasgow coma score
    "Glucose": Parameter(100, 5, 1500),  # mg/dL
    "HCO3": Parameter(25, 2, 60),  # mmol/L
    "HCT": Parameter(42, 5, 75),  # %
    "HR": Parameter(75, 10, 300),  # beats a minute
    "K": Parameter(4.2, 1, 15),  # mmol/L
    "Lactate": Parameter(1.2, 0, 40),  # mmol/L
    "Mg": Parameter(0.85, 0.1, 10),  # mmol/L
    "MAP": Parameter(90, 10, 250),  # mmHg, invasive
    "MechVent": Parameter(0, 0, 1),  # ventilated; only 1 is ever written
    "Na": Parameter(140, 90, 190),  # mmol/L
    "NIDiasABP": Parameter(75, 10, 200),  # mmHg, non-invasive
    "NIMAP": Parameter(90, 10, 250),  # mmHg
    "NISysABP": Parameter(120, 20, 320),  # mmHg
    "PaCO2": Parameter(40, 5, 200),  # mmHg
    "PaO2": Parameter(90, 15, 600),  # mmHg
    "pH": Parameter(7.4, 6.5, 8),
    "Platelets": Parameter(250, 1, 3000),  # 1000/uL
    "RespRate": Parameter(15, 1, 100),  # breaths a minute
    "SaO2": Parameter(97, 20, 100),  # %
    "SysABP": Parameter(120, 20, 320),  # mmHg, invasive
    "Temp": Parameter(36.8, 24, 45),  # degrees Celsius
    "TropI": Parameter(0.02, 0, 1000),  # ug/L
    "TropT": Parameter(0.01, 0, 100),  # ug/L
    "Urine": Parameter(60, 0, 10000),  # mL, as often as it is emptied
    "WBC": Parameter(7.5, 0, 500),  # 1000/uL
    "Weight": Parameter(75, 20, 400),  # kg
}
